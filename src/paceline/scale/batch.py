"""How the samples of a run are divided into steps, lanes and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


def share(lanes: int, rank: int, size: int) -> range:
    """Return the lanes of a rank: contiguous, as even as possible.

    >>> [list(share(8, rank, 3)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    start = sum(split_evenly(lanes, size)[:rank])
    return range(start, start + split_evenly(lanes, size)[rank])


def share_blocks(lanes: int, blocks: int, rank: int, size: int) -> range:
    """Return the lanes of a rank when blocks of lanes must stay on one rank.

    >>> [list(share_blocks(8, 4, rank, 3)) for rank in range(3)]
    [[0, 1, 2, 3], [4, 5], [6, 7]]
    """
    own, per_block = share(blocks, rank, size), lanes // blocks
    return range(own.start * per_block, own.stop * per_block)


def split_evenly(amount: int, parts: int) -> list[int]:
    """Divide an amount into parts as even as possible, larger ones first.

    >>> split_evenly(10, 4)
    [3, 3, 2, 2]
    """
    least, rest = divmod(amount, parts)
    return [least + (part < rest) for part in range(parts)]


class LaneChoice(NamedTuple):
    """Which lanes each rank runs in one step, where that is not `share`; the sum is the same whoever runs them."""

    step: int
    """The number of the step, from 0; batches of evaluations are chosen in every step."""
    choose: Callable[[int, int, int], Sequence[int]]
    """choose(lanes, rank, size) -> the lanes of a rank, in the order in which it runs them: as many as usual."""


class LanePlan(NamedTuple):
    """One lane of one step: the places of the epoch's order that it reads, and its weight."""

    lane: int
    places: range
    samples: int
    """Samples that count; 0 in a lane that a short last step leaves empty. It reads lane 0."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: the lanes of one rank, and totals over all ranks."""

    index: int
    """The number of the step in the run, from 0."""
    epoch: int
    samples: int
    """Samples of the step over all ranks."""
    seen: int
    """Samples of the run over all ranks, this step included."""
    lanes: tuple[LanePlan, ...]
    within: int
    """The number of the step in its epoch, from 0."""
    ends_epoch: bool


@dataclass(frozen=True)
class BatchPlan:
    """How a dataset is divided into steps. A pure function: checkpoints store nothing of it."""

    samples: int
    global_size: int
    lanes: int
    rank: int
    size: int
    blocks: int = 0
    """Blocks of lanes that stay on one rank; 0: lanes are independent."""
    choice: LaneChoice | None = None
    """A step in which ranks run other lanes than usual; with `blocks` there is none."""

    @cached_property
    def mine(self) -> range:
        """The lanes of this rank."""
        return share_blocks(self.lanes, self.blocks or self.lanes, self.rank, self.size)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, including a short last one."""
        return -(-self.samples // self.global_size)

    @cached_property
    def largest_step(self) -> int:
        """Samples of a whole step: fewer than `global_size` if the dataset has fewer."""
        return min(self.samples, self.global_size)

    def seen_after(self, step: int) -> int:
        """Return the samples that all ranks have seen after `step` steps.

        >>> [BatchPlan(samples=10, global_size=4, lanes=2, rank=0, size=1).seen_after(step) for step in range(5)]
        [0, 4, 8, 10, 14]
        """
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.samples + min(within * self.global_size, self.samples)

    def step(self, step: int) -> StepPlan:
        """Return the work of this rank in a step, counted from 0.

        >>> plan = BatchPlan(samples=10, global_size=8, lanes=4, rank=1, size=2)
        >>> [list(lane.places) for lane in plan.step(0).lanes], [lane.samples for lane in plan.step(1).lanes]
        ([[4, 5], [6, 7]], [0, 0])
        """
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_size
        samples = min(self.global_size, self.samples - start)
        if self.choice is not None and step == self.choice.step and not self.blocks:
            cuts = self._cuts(samples, self.choice.choose(self.lanes, self.rank, self.size))
        else:
            cuts = (
                self._full_cuts if samples == self.global_size else self._cuts(samples, self.mine)
            )
        lanes = [
            LanePlan(lane, range(start + first, start + last), count)
            for lane, first, last, count in cuts
        ]
        seen = epoch * self.samples + start + samples
        is_last = within == self.steps_per_epoch - 1
        return StepPlan(step, epoch, samples, seen, tuple(lanes), within, is_last)

    @cached_property
    def _full_cuts(self) -> list[tuple[int, int, int, int]]:
        return self._cuts(self.global_size, self.mine)

    def _cuts(self, samples: int, mine: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Return (lane, first place, end, samples that count) for each lane."""
        ends = list(accumulate(split_evenly(samples, self.lanes), initial=0))
        cuts = []
        for lane in mine:
            first, end = ends[lane], ends[lane + 1]
            cuts.append((lane, first, end, end - first) if end > first else (lane, 0, ends[1], 0))
        return cuts
