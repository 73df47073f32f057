"""The lanes of an update: what they read and write, their losses, and the gradients with which backward starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.data.reading.batches import Lane, RankBatch
from paceline.exact.loss import LossFunction, named_values
from paceline.exact.loss_checks import LossChecks
from paceline.exact.optimizer import OptimizerUpdates
from paceline.exact.row import Layout, Rows
from paceline.world.randomness import seed_everything


class UpdateCall(NamedTuple):
    """What the user's loop asks for with `Run.update` or `Run.backward`."""

    optimizer: torch.optim.Optimizer
    loss: LossFunction
    step: RankBatch
    number: int
    """The number of the update in its step: each draws other random numbers."""
    clip_norm: float = 0.0
    over_batch: Callable[[Tensor], Tensor] | None = None

    def seeds_of(self, seed: int, lane: int) -> tuple[int, ...]:
        """Return the numbers that make the seed of a lane."""
        step = self.step.plan.index
        return (seed, step, lane, self.number) if self.number else (seed, step, lane)


class LaneMemory:
    """What the lanes of an eager update read and write: batches as they were read, seeded generators, rows."""

    is_recorded = False
    """Whether a CUDA graph records the lanes, or is compared with them: the host then reads nothing."""
    sends = True
    """Whether the backward of the last lane sends gradients."""

    def __init__(self, updates: OptimizerUpdates, call: UpdateCall, seed: int) -> None:
        self._updates, self._call, self._seed = updates, call, seed

    def batch(self, row: int) -> Any:
        """Seed the generators for the lane in this row; return its batch."""
        lane = self._call.step.lanes[row]
        seed_everything(*self._call.seeds_of(self._seed, lane.number))
        return lane.batch

    def rows(self, layout: Layout) -> Rows:
        """Return the rows of the lanes."""
        return self._updates.rows_of(layout, len(self._call.step.lanes))


class LaneLosses:
    """Forward of each lane of an update, and the gradient with which its backward starts: a loss of each lane."""

    def __init__(
        self, updates: OptimizerUpdates, call: UpdateCall, checks: LossChecks | None
    ) -> None:
        self.updates, self.call, self._checks = updates, call, checks

    def forward(self, lane: Lane, batch: Any) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        """Return the output of a lane, its gradient (the lane's weight in the step), and what goes into its row."""
        with self.updates.precision.context():
            result = self.call.loss(batch)
        output, values = named_values(result)
        by_count = isinstance(values["loss"], tuple)
        if self._checks is not None:
            self._checks.examine(output, lane, self.call.step, self.call.number, by_count=by_count)
        weight = lane.samples / self.call.step.plan.samples
        if by_count:
            weight = float(lane.samples > 0)
        return output, self.updates.gradient_of(output, weight), values

    def complete(self) -> None:
        """Add what the lanes could not: nothing."""
