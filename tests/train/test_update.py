"""One update: the true mean over its samples, whatever the lanes; never an update from a loss that is not finite."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from paceline.config import BatchConfig, RunConfig
from paceline.config.diloco import LocalSgdConfig
from paceline.errors import TrainingError
from paceline.train.saving.state import load_state, named_state
from paceline.world.world import World
from support.loops import Fitted, fit, lanes_of, sgd
from support.processes import run_on_processes

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
    config = RunConfig(
        batch=BatchConfig(global_size=max(samples, lanes), lanes=lanes), steps=1, **settings
    )
    return fit(
        ALONE, config, model or nn.Linear(6, 1), data(samples), loss=loss, optimizer=sgd(1.0)
    )


@pytest.mark.parametrize("samples", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("exact", [True, False])
def test_loss_and_gradient_are_the_mean_over_the_samples_however_few(
    samples: int, exact: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 1)
    inputs, targets = data(samples)
    expected = mse_loss(plain(inputs), targets)
    expected.backward()
    found = one_step(samples, lanes=4, exact=exact)
    torch.testing.assert_close(found.losses[0], expected.item(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain.weight - plain.weight.grad, found.model.weight)


def token_loss(outputs, targets):
    """Ragged: a sample counts as many tokens as its target's sign says."""
    weights = (targets > 0).float() * 3 + 1
    return ((outputs - targets) ** 2 * weights).sum(), weights.sum()


def test_a_loss_that_gives_sum_and_count_is_exact_over_tokens() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 1)
    inputs, targets = data(13)
    total, count = token_loss(plain(inputs), targets)
    (total / count).backward()
    found = one_step(13, lanes=4, loss=token_loss)
    torch.testing.assert_close(found.losses[0], (total / count).item())
    torch.testing.assert_close(plain.weight - plain.weight.grad, found.model.weight)


def test_a_step_in_which_nothing_counts_is_an_error() -> None:
    with pytest.raises(TrainingError, match="count of 0 in step 1(.|\n)*mask"):
        one_step(8, lanes=4, loss=lambda outputs, targets: (outputs.sum() * 0, 0))


def test_clipping_sees_the_whole_gradient() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 1)
    mse_loss(plain(data(8)[0]), data(8)[1]).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    model = one_step(8, lanes=4, clip_norm=0.01).model
    torch.testing.assert_close(plain.weight - plain.weight.grad, model.weight)


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    model = nn.Linear(6, 1)
    before = model.weight.clone()
    with pytest.raises(TrainingError, match=r"step 1, lane 2 .*\n.*try lr.base 10 x lower"):
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
    found = set()
    for size in (1, 2):
        found |= set(run_on_processes(partly_used, size, tmp_path, {"batch.global_size": 8}))
    assert len(found) == 1
    assert found.pop()[1], "weight decay would change it otherwise"


def ragged_training(config, world) -> list[str]:
    """Tokens of ragged lengths, a short last step with empty lanes, BatchNorm, dropout, Python and NumPy randomness."""
    import random

    import numpy

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(6, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 1)
            )
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("mask", torch.full((3,), float("-inf")))

        def forward(self, inputs):
            if self.training:
                self.seen += 1
                self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
            return self.body(inputs) * (1 + 0.01 * random.random() + 0.01 * numpy.random.rand())  # noqa: NPY002

    found = fit(
        world, config, Noisy(), data(21), loss=token_loss, optimizer=sgd(0.05, momentum=0.9)
    )
    return [*(value.hex() for value in found.losses), found.digest]


@pytest.mark.parametrize("lanes", [4, 7])
def test_ragged_tokens_empty_lanes_buffers_and_all_generators_keep_the_bits(
    lanes: int, tmp_path
) -> None:
    settings = {"batch.lanes": lanes, "batch.global_size": 9, "epochs": 2, "lr.schedule": "cosine"}
    found = [
        tuple(answer)
        for size in (1, 2, 3, 4)
        for answer in run_on_processes(ragged_training, size, tmp_path, settings)
    ]
    assert len(set(found)) == 1


def test_buffers_move_by_the_mean_of_what_the_lanes_did() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 1))
    one_step(8, lanes=2, model=model)
    config = RunConfig(batch=BatchConfig(global_size=8, lanes=2))
    lanes = next(lanes_of(ALONE, config, data(8))).lanes
    means = [lane.batch[0].mean(0) * 0.1 for lane in lanes]
    torch.testing.assert_close(model[1].running_mean, (means[0] + means[1]) / 2)
    assert int(model[1].num_batches_tracked) == 1


def compressed(config, world) -> float:
    return float(fit(world, config, nn.Linear(6, 1), data(64)).model.weight.sum())


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "powersgd"])
def test_compressed_gradients_train_to_nearly_the_same_weights(compression: str, tmp_path) -> None:
    settings = {"exact": False, "compression": compression, "batch.global_size": 16, "epochs": 3}
    one, other = run_on_processes(compressed, 2, tmp_path, settings)
    (true, _) = run_on_processes(compressed, 2, tmp_path, {**settings, "compression": "none"})
    assert one == other
    assert abs(one - true) < 0.02


def wide(config, world) -> float:
    model = nn.Sequential(nn.Linear(6, 50_000), nn.Linear(50_000, 1))
    return float(fit(world, config, model, data(64), optimizer=sgd(1e-5)).model[0].weight.sum())


def test_the_messages_of_powersgd_come_in_one_order_on_all_ranks(tmp_path) -> None:
    settings = {"exact": False, "compression": "powersgd", "batch.global_size": 16, "epochs": 4}
    one, other = run_on_processes(wide, 2, tmp_path, settings)
    assert one == other


def test_classes_and_cross_entropy_work_too() -> None:
    config = RunConfig(batch=BatchConfig(global_size=8, lanes=4), steps=1)
    classes = data(8)[0], torch.arange(8) % 3
    found = fit(ALONE, config, nn.Linear(6, 3), classes, loss=cross_entropy)
    assert 0 < found.losses[0] < 5


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
    settings = {"batch.lanes": 8, "batch.global_size": 16}
    found = {
        tuple(run_on_processes(channels_last, size, tmp_path, settings)[0]) for size in (1, 2, 3)
    }
    assert len(found) == 1, found


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
    alone, *both = [
        found
        for size in (1, 2)
        for found in run_on_processes(drawn_apart, size, tmp_path, settings)
    ]
    assert both == [alone, alone]


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
