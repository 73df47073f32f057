"""One update: the true mean over its samples, whatever the lanes; never an update from a loss that is not finite."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from paceline.config import BatchConfig, RunConfig
from paceline.config.diloco import LocalSgdConfig
from paceline.errors import TrainingError
from paceline.exact.state import load_state, named_state
from paceline.world.world import World
from support.loops import Fitted, fit, lanes_of, sgd
from support.processes import in_worlds, run_on_processes

ALONE = World()


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, 6, generator=generator), torch.randn(
        samples, 1, generator=generator
    )


def one_step(samples: int, lanes: int, loss=mse_loss, model=None, **settings) -> Fitted:
    torch.manual_seed(0)
    batch = BatchConfig(global_size=max(samples, lanes), lanes=lanes)
    config, model = RunConfig(batch=batch, steps=1, **settings), model or nn.Linear(6, 1)
    return fit(ALONE, config, model, data(samples), loss=loss, optimizer=sgd(1.0))


def plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 1)


@pytest.mark.parametrize("samples", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("exact", [True, False])
def test_loss_and_gradient_are_the_mean_over_the_samples_however_few(samples, exact):
    model = plain()
    inputs, targets = data(samples)
    expected = mse_loss(model(inputs), targets)
    expected.backward()
    found = one_step(samples, lanes=4, exact=exact)
    torch.testing.assert_close(found.losses[0], expected.item(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.weight - model.weight.grad, found.model.weight)


def token_loss(outputs, targets):
    """Ragged: a sample counts as many tokens as its target's sign says."""
    weights = (targets > 0).float() * 3 + 1
    return ((outputs - targets) ** 2 * weights).sum(), weights.sum()


def test_a_loss_that_gives_sum_and_count_is_exact_over_tokens() -> None:
    model = plain()
    inputs, targets = data(13)
    total, count = token_loss(model(inputs), targets)
    (total / count).backward()
    found = one_step(13, lanes=4, loss=token_loss)
    torch.testing.assert_close(found.losses[0], (total / count).item())
    torch.testing.assert_close(model.weight - model.weight.grad, found.model.weight)


def test_a_step_in_which_nothing_counts_is_an_error() -> None:
    with pytest.raises(TrainingError, match="0 in step 1(.|\n)*mask"):
        one_step(8, lanes=4, loss=lambda outputs, targets: (outputs.sum() * 0, 0))


def test_clipping_sees_the_whole_gradient() -> None:
    model = plain()
    mse_loss(model(data(8)[0]), data(8)[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found = one_step(8, lanes=4, clip_norm=0.01)
    torch.testing.assert_close(model.weight - model.weight.grad, found.model.weight)


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    model = nn.Linear(6, 1)
    before = model.weight.clone()
    with pytest.raises(TrainingError, match=r"step 1, lane 2 .*\n.*lr\.base"):
        one_step(8, lanes=4, model=model, loss=LaneNaN(lane=2))
    assert torch.equal(model.weight, before)


class LaneNaN:
    """A loss that is NaN on one call."""

    def __init__(self, lane: int) -> None:
        self.left = lane

    def __call__(self, outputs, targets):
        self.left -= 1
        return mse_loss(outputs, targets) * (float("nan") if self.left == -1 else 1.0)


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs):
        return self.used(inputs)


def partly_used(config, world) -> tuple[str, bool]:
    torch.manual_seed(0)
    found = fit(world, config, Partly(), data(8), optimizer=sgd(0.1, weight_decay=0.5))
    return found.digest, found.model.unused.weight.grad is None


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient_in_any_world(tmp_path) -> None:
    _, has_none = in_worlds(partly_used, tmp_path, {"batch.global_size": 8})
    assert has_none, "weight decay would change it otherwise"


def test_buffers_move_by_the_mean_of_what_the_lanes_did() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 1))
    one_step(8, lanes=2, model=model)
    config = RunConfig(batch=BatchConfig(global_size=8, lanes=2))
    lanes = next(lanes_of(ALONE, config, data(8))).lanes
    means = [lane.batch[0].mean(0) * 0.1 for lane in lanes]
    torch.testing.assert_close(model[1].running_mean, (means[0] + means[1]) / 2)
    assert int(model[1].num_batches_tracked) == 1


def compressed(config, world, wide: bool = False) -> float:
    layers = [nn.Linear(6, 50_000), nn.Linear(50_000, 1)] if wide else [nn.Linear(6, 1)]
    rule = sgd(1e-5) if wide else sgd()
    model = fit(world, config, nn.Sequential(*layers), data(64), optimizer=rule).model
    return float(model[0].weight.sum())


def test_compressed_gradients_train_to_nearly_the_same_weights(tmp_path) -> None:
    settings = {"exact": False, "batch.global_size": 16, "epochs": 3}
    found = {}
    for kind in ("none", "fp16", "bf16", "powersgd"):
        given = settings | {"compression": kind}
        found[kind], other = run_on_processes(compressed, 2, tmp_path, given)
        assert found[kind] == other
    assert list(found.values()) == pytest.approx([found["none"]] * 4, abs=0.02)


def test_the_messages_of_powersgd_come_in_one_order_on_all_ranks(tmp_path) -> None:
    settings = {"exact": False, "compression": "powersgd", "batch.global_size": 16, "epochs": 4}
    one, other = run_on_processes(compressed, 2, tmp_path, settings, {"wide": True})
    assert one == other


def channels_last(config, world) -> list[str]:
    """Convolutions whose weights lie channels last, with and without statistics."""
    generator = torch.Generator().manual_seed(3)
    data = (
        torch.randn(24, 3, 6, 6, generator=generator),
        torch.randint(0, 3, (24,), generator=generator),
    )
    found = []
    for norm in (nn.Identity(), nn.BatchNorm2d(8)):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 3)
        model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        rule = sgd(0.05, momentum=0.9)
        found.append(fit(world, config, model, data, loss=cross_entropy, optimizer=rule).digest)
    return found


def test_weights_that_lie_channels_last_keep_the_bits(tmp_path) -> None:
    in_worlds(channels_last, tmp_path, {"batch.lanes": 8, "batch.global_size": 16})


def drawn_apart(config, world) -> list[str]:
    """What is trained when ranks have drawn different weights."""
    data, found = (torch.arange(24.0).view(12, 2) / 24, torch.arange(12.0).view(12, 1) / 12), []
    for settings in (
        {"parallel": "ddp"},
        {"parallel": "fsdp"},
        {"local_sgd": LocalSgdConfig(steps=2, replicas=2)},
    ):
        torch.manual_seed(7 + world.rank)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        double = tuple(part.double() for part in data)
        fitted = fit(world, replace(config, **settings), model, double, wrap=(nn.Linear,))
        found.append(fitted.digest)
    return found


def test_ranks_that_have_drawn_different_weights_begin_with_those_of_rank_0(tmp_path) -> None:
    settings = {"batch.lanes": 4, "batch.global_size": 8}
    in_worlds(drawn_apart, tmp_path, settings, worlds=(1, 2))


def test_what_an_optimizer_remembers_lies_as_its_weights_do_when_it_is_loaded() -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    saved = [(name, value.clone().contiguous()) for name, value in named_state(model, optimizer)]
    assert load_state(model, optimizer, saved, {}) == []
    assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()


def frozen_in_turns(config, world) -> int:
    """The hooks of a parameter after another one was frozen and unfrozen in turns."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))

    def toggle(run) -> None:
        model[0].weight.requires_grad_(not model[0].weight.requires_grad)

    fit(world, config, model, data(48), before=toggle)
    return len(model[1].weight._post_accumulate_grad_hooks)


def test_freezing_in_every_step_leaves_no_hooks_behind(tmp_path) -> None:
    settings = {"batch.lanes": 4, "batch.global_size": 8}
    assert run_on_processes(frozen_in_turns, 2, tmp_path, settings) == [1, 1]
