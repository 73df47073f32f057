"""A loss that is a sum over samples is taken for the mean of its lane: that is said once, where it makes a difference."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.train.step import losses
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
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses.terminal, "error", said.append)
        for loss in (mean, scaled, counted):
            fit(world, config, nn.Linear(6, 6), (ROWS, ROWS), loss=loss)
        assert said == []
        for loss in (summed, summed_by_hand):
            fit(world, config, nn.Linear(6, 6), (ROWS, ROWS), loss=loss)
    assert len(said) == 2
    assert all("4 lanes" in text for text in said)
