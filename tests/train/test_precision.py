"""Numbers of other widths: the same bits on any number of ranks, and with fp16 no gradient lost and none infinite."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from paceline.config import BatchConfig, RunConfig, config_from_words
from paceline.errors import ConfigError
from paceline.exact.precision import Precision
from paceline.recipes.gpt import build_optimizer, token_loss
from paceline.recipes.gpt_config import GptConfig, design_of
from paceline.recipes.gpt_model import GPT
from paceline.world.world import World
from support.loops import fit, sgd
from support.processes import in_worlds, run_on_processes


def trained(config, world) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 1))
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(40, 6, generator=generator), torch.randn(40, 1, generator=generator)
    return fit(world, config, model, data, optimizer=adamw).digest


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("precision", ["bf16", "bf16-master", "fp16"])
def test_any_number_of_ranks_trains_the_same_bits(precision, tmp_path):
    given = {"batch.lanes": 4, "batch.global_size": 16, "epochs": 2, "clip_norm": 0.5}
    found = in_worlds(trained, tmp_path, given | {"precision": precision})
    assert run_on_processes(trained, 1, tmp_path, given) != [found]


def test_forward_runs_in_the_numbers_that_were_asked_for():
    seen = []

    class Model(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.append(outputs.dtype)
            return outputs

    config = RunConfig(batch=BatchConfig(4, lanes=1), epochs=1, precision="bf16")
    model = Model(6, 1)
    fit(World(), config, model, (torch.ones(4, 6), torch.ones(4, 1)))
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32


def test_forward_sees_rounded_masters_and_the_optimizer_the_masters():
    seen = []

    class Model(nn.Sequential):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.append([self[0].weight.detach().clone(), inputs, outputs])
            return outputs

    config = RunConfig(batch=BatchConfig(4, lanes=2), epochs=1, precision="bf16-master")
    model = Model(nn.Linear(3, 3), nn.BatchNorm1d(3))
    master = model[0].weight
    before = master.detach().clone()
    fit(World(), config, model, (torch.randn(4, 3), torch.ones(4, 3)), optimizer=sgd(1e-3))
    assert len(seen) == 2
    for weight, *others in seen:
        assert torch.equal(weight, before.bfloat16())
        assert [value.dtype for value in others] == [torch.bfloat16] * 2
    assert model[0].weight is master
    assert not torch.equal(master, master.bfloat16().float())
    kept = master, master.grad, model[1].weight.grad, *model[1].buffers()
    assert {value.dtype for value in kept} == {torch.float32, torch.int64}
    assert model(torch.randn(4, 3)).dtype == torch.float32


GPT_WORDS = "size=nano layers=1 context_length=8 vocab_size=40 batch.global_size=4 batch.lanes=2"


def gpt_losses(world) -> dict[str, list[float]]:
    """The losses of a small GPT, by optimizer and precision."""
    found = {}
    kinds = itertools.product(("adamw", "fused", "muon"), ("bf16", "bf16-master"))
    for optimizer, precision in kinds:
        kind = "muon" if optimizer == "muon" else "adamw"
        words = [*GPT_WORDS.split(), f"precision={precision}", f"optimizer={kind}"]
        config = config_from_words(GptConfig, [*words, "lr.base=0.01", "steps=4"])
        torch.manual_seed(0)
        text = torch.arange(9).repeat(16, 1)
        data = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        model = GPT(design_of(config))
        rule = partial(chosen, model, config, fused=optimizer == "fused")
        fitted = fit(world, config, model, data, loss=token_loss, optimizer=rule)
        found[optimizer, precision] = fitted.losses
    return found


def chosen(model, config, parameters, *, fused: bool) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups if fused else ():
        group["fused"], group["foreach"] = True, False
    return optimizer


def test_losses_with_masters_are_near_those_of_autocast_with_every_optimizer(tmp_path):
    found = run_on_processes(gpt_losses, 1, tmp_path, {})[0]
    for optimizer in ("adamw", "fused", "muon"):
        plain, masters = found[optimizer, "bf16"], found[optimizer, "bf16-master"]
        assert masters == pytest.approx(plain, rel=0.02)
        assert masters != plain
        assert masters[-1] < masters[0]


def test_weights_that_no_copy_can_stand_for_are_refused():
    with pytest.raises(ConfigError, match="precision=bf16"):
        Precision(RunConfig(precision="bf16-master"), "cpu").begin(nn.Sequential(nn.LSTM(2, 2)))


def test_gradients_come_back_to_their_size_and_the_scale_grows_in_time():
    precision = Precision(RunConfig(precision="fp16"), "cpu")
    scale = precision.scale
    gradient = torch.tensor([3.0]) * scale
    assert precision.unscale([gradient])
    assert gradient.item() == 3.0
    for _ in range(1999):
        precision.unscale([torch.zeros(1)])
    assert precision.scale == 2 * scale


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_overflows_does_not_count_and_halves_the_scale(bad):
    precision = Precision(RunConfig(precision="fp16"), "cpu")
    scale = precision.scale
    assert not precision.unscale([torch.zeros(2), torch.tensor([1.0, bad])])
    assert precision.scale == scale / 2
    other = Precision(RunConfig(precision="fp16"), "cpu")
    other.restore(precision.state())
    assert other.state() == precision.state()


def test_weights_stay_as_they_are_where_a_step_does_not_count():
    config = RunConfig(batch=BatchConfig(4, lanes=2), steps=2, precision="fp16")
    model = nn.Linear(6, 1)
    weights, scales = [], [2.0**100, 1024.0]  # the first is more than fp16 holds

    def before(run):
        weights.append(model.weight.detach().clone())
        for updates in run._loop.updates._optimizers.values():
            updates.precision.scale = scales.pop(0)

    fit(World(), config, model, (torch.full((8, 6), 3.0), torch.ones(8, 1)), before=before)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], model.weight)
