"""Muon: matrices move evenly in all directions, the rest as by AdamW; bits do not depend on breaks, ranks or capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import ConfigError
from paceline.events import surviving
from paceline.recipes.gpt import build_optimizer
from paceline.recipes.gpt_config import design_of
from paceline.recipes.gpt_model import GPT
from paceline.recipes.muon import Muon, orthogonalize
from support.processes import run_on_processes
from support.tiny_gpt import digest, tiny, train, write

TEXT = "the same bits, whoever counts them.\n" * 20


def twins(*shape: int) -> tuple[nn.Parameter, nn.Parameter]:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return nn.Parameter(start.clone()), nn.Parameter(start.clone())


def push(optimizers, parameters, steps: int = 5) -> None:
    """Take steps with the same gradients on both sides."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        gradient = torch.randn(parameters[0].shape, generator=generator)
        for optimizer, parameter in zip(optimizers, parameters, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 40), (2, 40, 5)])
def test_all_directions_become_about_equally_strong(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.3
    assert values.max() < 1.3
    signs = torch.linalg.svd(matrices, full_matrices=False)
    apart = orthogonalize(matrices) - signs.U @ signs.Vh
    assert torch.linalg.matrix_norm(apart, 2).max() < 0.7, "it turns nothing"
    assert not orthogonalize(torch.zeros(shape)).any(), "no gradient moves nothing"


@pytest.mark.filterwarnings("ignore")  # torch multiplies in bf16, and says where a CPU has none
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_matrices_move_as_by_torchs_muon_and_the_rest_as_by_its_adamw(shape):
    ours, theirs = twins(*shape)
    mine = Muon([{"params": [ours], "rule": "muon", "weight_decay": 0.1}], 0.02)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    push((mine, other), (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-3)
    ours, theirs = twins(*shape)
    mine = Muon([{"params": [ours], "weight_decay": 0.1}], 0.02)
    other = torch.optim.AdamW([theirs], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    push((mine, other), (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_pieces_of_a_matrix_are_matrices():
    whole, other = twins(6, 4)
    parts = [nn.Parameter(part.clone()) for part in other.detach().chunk(3)]
    mine = Muon([{"params": [whole], "rule": "muon", "pieces": 3}], 0.1)
    apart = Muon([{"params": parts, "rule": "muon"}], 0.1)
    whole.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(4))
    for part, gradient in zip(parts, whole.grad.chunk(3), strict=True):
        part.grad = gradient.clone()
    mine.step()
    apart.step()
    again = torch.cat([part.detach() for part in parts])
    torch.testing.assert_close(whole.detach(), again, rtol=0, atol=1e-6)


class NothingComesToTheHost(TorchDispatchMode):
    """Fail where a number is read out of a tensor, which no captured step could do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_a_rate_may_be_a_tensor_and_gives_the_same_bits(rule):
    pair = twins(12, 20)
    plain, other = (
        Muon([{"params": [value], "rule": rule, "weight_decay": 0.1}], 0.02) for value in pair
    )
    [group] = other.param_groups
    assert group["capturable"] is False
    group |= {"capturable": True, "lr": torch.tensor(0.02)}
    push([plain], pair[:1])
    with NothingComesToTheHost():
        push([other], pair[1:])
    assert torch.equal(*pair)
    values = [value for state in other.state.values() for value in state.values()]
    assert all(isinstance(value, torch.Tensor) for value in values)


def test_only_the_matrices_of_the_blocks_move_by_muon():
    config = tiny("optimizer=muon", "vocab_size=256")
    model = GPT(design_of(config))
    names = {value: name for name, value in model.named_parameters()}
    groups = {}
    for group in build_optimizer(model, config).param_groups:
        key = group["rule"], group["pieces"], group["weight_decay"]
        groups[key] = {names[value] for value in group["params"]}
    matrices = {"blocks.0.out.weight", "blocks.0.up.weight", "blocks.0.down.weight"}
    tables = {"embedding.weight", "position.weight"}
    assert groups == {
        ("muon", 3, 0.1): {"blocks.0.qkv.weight"},
        ("muon", 1, 0.1): matrices,
        ("adamw", 1, 0.1): tables,
        ("adamw", 1, 0.0): set(names.values()) - matrices - tables - {"blocks.0.qkv.weight"},
    }


def trained(words):
    run = train("optimizer=muon", *words)
    return digest(run) if run.events.exists() else ""


def test_a_resumed_run_and_one_on_two_ranks_have_the_bits_of_the_straight_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = f"data_folder={write(tmp_path, TEXT)}"
    straight = trained([text, "steps=6", "name=straight"])
    trained([text, "steps=2", "name=broken"])
    assert trained([text, "steps=6", "name=broken"]) == straight
    assert run_on_processes(trained, 2, tmp_path, {}, {"words": [text, "steps=6"]})[0] == straight


def test_it_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["optimizer=muon", "steps=25", "log.every_steps=1", "lr.base=0.01"]
    run = train(*words, f"data_folder={write(tmp_path, TEXT)}")
    losses = [event["loss"] for event in surviving(run.events) if event["event"] == "StepDone"]
    assert len(losses) == 25
    assert losses[-1] < losses[0] / 1.4


@pytest.mark.parametrize(
    ("group", "problem"), [({"rule": "muon"}, r"\[4\]"), ({"rule": "sgd"}, "'sgd'")]
)
def test_what_it_cannot_move_is_refused(group, problem):
    with pytest.raises(ConfigError, match=problem):
        Muon([{"params": [nn.Parameter(torch.zeros(4))], **group}], 0.1)
