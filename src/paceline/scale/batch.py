"""How the samples of a run are cut into steps, lanes and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


def share(lanes: int, rank: int, size: int) -> range:
    """Return the lanes of a rank: contiguous, as even as they go.

    >>> [list(share(8, rank, 3)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    start = sum(split_evenly(lanes, size)[:rank])
    return range(start, start + split_evenly(lanes, size)[rank])


def share_blocks(lanes: int, blocks: int, rank: int, size: int) -> range:
    """Return the lanes of a rank where they come in blocks of equal size that stay together.

    >>> [list(share_blocks(8, 4, rank, 3)) for rank in range(3)]
    [[0, 1, 2, 3], [4, 5], [6, 7]]
    """
    mine, each = share(blocks, rank, size), lanes // blocks
    return range(mine.start * each, mine.stop * each)


def split_evenly(amount: int, parts: int) -> list[int]:
    """Cut an amount into parts as even as they go, the larger ones first.

    >>> split_evenly(10, 4)
    [3, 3, 2, 2]
    """
    least, rest = divmod(amount, parts)
    return [least + (part < rest) for part in range(parts)]


class LanePlan(NamedTuple):
    """One lane of one step: which places of the epoch's order it reads, and how much it weighs."""

    lane: int
    places: range
    samples: int
    """Samples that count; 0 for a lane that a short last step leaves empty: it borrows the places of lane 0."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: the lanes of one rank, and what all ranks do together."""

    index: int
    """Which step of the run this is, from 0."""
    epoch: int
    samples: int
    """Samples of the step over all ranks."""
    seen: int
    """Samples of the run over all ranks, this step included."""
    lanes: tuple[LanePlan, ...]
    within: int
    """Which step of its epoch it is, from 0."""
    ends_epoch: bool


@dataclass(frozen=True)
class BatchPlan:
    """How a training set becomes steps: a pure function, so nothing of it is ever stored."""

    samples: int
    global_size: int
    lanes: int
    rank: int
    size: int
    blocks: int = 0
    """Blocks of lanes that stay together on a rank; 0: every lane goes by itself."""

    @cached_property
    def mine(self) -> range:
        """The lanes of this rank."""
        return share_blocks(self.lanes, self.blocks or self.lanes, self.rank, self.size)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, a short last one included."""
        return -(-self.samples // self.global_size)

    def seen_after(self, step: int) -> int:
        """Return the samples of the run after so many steps.

        >>> [BatchPlan(samples=10, global_size=4, lanes=2, rank=0, size=1).seen_after(step) for step in range(5)]
        [0, 4, 8, 10, 14]
        """
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.samples + min(within * self.global_size, self.samples)

    def step(self, step: int) -> StepPlan:
        """Return what this rank does in a step, counted from 0.

        >>> plan = BatchPlan(samples=10, global_size=8, lanes=4, rank=1, size=2)
        >>> [list(lane.places) for lane in plan.step(0).lanes], [lane.samples for lane in plan.step(1).lanes]
        ([[4, 5], [6, 7]], [0, 0])
        """
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_size
        samples = min(self.global_size, self.samples - start)
        cuts = self._full_cuts if samples == self.global_size else self._cuts(samples)
        lanes = tuple(
            [
                LanePlan(lane, range(start + first, start + last), count)
                for lane, first, last, count in cuts
            ]
        )
        seen = epoch * self.samples + start + samples
        return StepPlan(
            step, epoch, samples, seen, lanes, within, within == self.steps_per_epoch - 1
        )

    @cached_property
    def _full_cuts(self) -> list[tuple[int, int, int, int]]:
        return self._cuts(self.global_size)

    def _cuts(self, samples: int) -> list[tuple[int, int, int, int]]:
        """Return (lane, first place, last place, samples that count) for the lanes of this rank in a step."""
        ends = list(accumulate(split_evenly(samples, self.lanes), initial=0))
        found = [(lane, *ends[lane : lane + 2], ends[lane + 1] - ends[lane]) for lane in self.mine]
        return [
            (lane, first, last, count) if count else (lane, 0, ends[1], 0)
            for lane, first, last, count in found
        ]
