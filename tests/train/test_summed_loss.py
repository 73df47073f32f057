"""A loss that is no mean over samples is taken for the mean of its lane: that is said once, where it makes a difference."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.exact import loss_checks
from support.loops import fit
from support.processes import on_processes

ROWS = torch.rand(48, 6, generator=torch.Generator().manual_seed(1))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def summed_by_hand(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().sum() + 0.1 * output.mean()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target) + 0.01 * output.sum() / len(output)


def scaled(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum") * (1 / len(output))


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return summed(output, target), len(output)


@on_processes(1, **{"batch.global_size": 24, "batch.lanes": 4, "steps": 3})
def test_a_sum_is_mentioned_once_and_a_mean_is_not(config, world) -> None:
    for loss in (mean, scaled, counted):
        assert said_of(world, config, loss, ROWS, nn.Linear(6, 6)) == []
    for loss in (summed, summed_by_hand):
        [said] = said_of(world, config, loss, ROWS, nn.Linear(6, 6))
        assert "4 lanes" in said


WORDS = torch.randint(0, 6, (48, 5), generator=torch.Generator().manual_seed(2))
PADDED = WORDS.masked_fill(torch.arange(5) > (torch.arange(48) % 5)[:, None], -100)
ROW_END = torch.cat([WORDS[:, 1:], torch.full((48, 1), -100)], 1)
"""As transformers shift labels: each row has the same number of ignored ones."""


def tokens(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.unflatten(1, (5, 6)).flatten(0, 1), target.flatten())


def masked(output: Tensor, target: Tensor) -> Tensor:
    mask = target != -100
    logits = output.unflatten(1, (5, 6)).transpose(1, 2)
    each = functional.cross_entropy(logits, target.clamp(min=0), reduction="none")
    return 0.5 * (each * mask).sum() / mask.sum() + 0.01 * output.square().mean()


def selected(output: Tensor, target: Tensor) -> Tensor:
    return output.unflatten(1, (5, 6))[target != -100].square().mean()


def balanced(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.arange(1.0, 7.0)
    return functional.cross_entropy(output[:, :6], target[:, 0].clamp(min=0), weight=weight)


def classes(output: Tensor, target: Tensor) -> Tensor:
    """Means over samples, over parameters, and divided by a constant: the same in lanes of any size."""
    found = functional.cross_entropy(output[:, :6], target[:, 0].clamp(min=0), label_smoothing=0.1)
    return found + 0.1 * output.abs().mean() + output.square().sum(1).mean() / 7


def per_sample(output: Tensor, target: Tensor) -> Tensor:
    logits = output.unflatten(1, (5, 6)).transpose(1, 2)
    each = functional.cross_entropy(logits, target, reduction="none").sum(1)
    return (each / (target != -100).sum(1).clamp(min=1)).mean()


def rescaled(output: Tensor, target: Tensor) -> Tensor:
    """A mean over tokens that the script weights by their number itself."""
    return tokens(output, target) * (target != -100).sum() / (3.0 * len(output))


def counted_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    count = (target != -100).sum()
    return tokens(output, target) * count, count


def said_of(world, config, loss, target: Tensor, model: nn.Module | None = None) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_checks.terminal, "error", said.append)
        fit(world, config, model or nn.Linear(6, 30), (ROWS, target), loss=loss)
    return said


@on_processes(1, **{"batch.global_size": 22, "batch.lanes": 4, "steps": 5})
def test_a_mean_over_tokens_or_class_weights_is_mentioned_once_and_others_are_not(
    config, world
) -> None:
    for loss in (tokens, masked, selected, balanced):
        assert len(said := said_of(world, config, loss, PADDED)) == 1, loss
        assert "lane 0" in said[0]
        assert "(loss * count, count)" in said[0]
    for loss in (classes, per_sample, rescaled, counted_tokens):
        assert said_of(world, config, loss, PADDED) == [], loss
    for target in (WORDS, ROW_END):
        assert said_of(world, config, tokens, target) == []


@on_processes(2, **{"batch.global_size": 22, "batch.lanes": 2, "steps": 5})
def test_a_rank_with_one_lane_compares_it_with_the_next_step(config, world) -> None:
    assert len(said_of(world, config, tokens, PADDED)) == int(world.is_main)
    assert said_of(world, config, classes, PADDED) == []


def contrastive(output: Tensor, _: Tensor) -> Tensor:
    rows = functional.normalize(output, dim=1)
    return functional.cross_entropy(10 * rows @ rows.T, torch.arange(len(rows)))


@on_processes(1, **{"batch.global_size": 24, "batch.lanes": 4, "steps": 2})
def test_a_loss_that_compares_the_samples_of_a_lane_is_mentioned_once(config, world) -> None:
    two = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
    assert said_of(world, config, mean, ROWS, two) == []
    [said] = said_of(world, config, contrastive, ROWS, nn.Linear(6, 6))
    assert "over_batch" in said
