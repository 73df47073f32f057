"""Which samples a rank reads next: a few steps at a time, from any step of a run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy

from paceline.data.order import Order, Places
from paceline.data.sampling import SampleOrder
from paceline.scale.batch import BatchPlan, StepPlan

_GROUP_BYTES = 1 << 24  # a larger read costs less per step besides its bytes (docs/notes.md)
_MOST_STEPS = 64


class StepGroup(NamedTuple):
    """Consecutive steps of one epoch whose samples are read together."""

    plans: list[StepPlan]
    lane_sizes: list[int]
    samples: Places
    key: tuple[int, int]
    """(seed, epoch)."""
    draws: Places
    """The keys of the randomness of the samples: the samples themselves if each comes once per epoch."""

    def samples_by_lane(self) -> list[Places]:
        """Return the samples of one lane after the other."""
        return numpy.split(self.samples, numpy.cumsum(self.lane_sizes)[:-1])

    def draws_by_lane(self) -> list[Places]:
        """Return the draws of one lane after the other."""
        return numpy.split(self.draws, numpy.cumsum(self.lane_sizes)[:-1])


class ReadSchedule:
    """The samples of this rank in the order of the run, cut into groups of steps.

    `announce` receives the blocks of the next window of the order, before their samples are due.
    """

    def __init__(
        self,
        plan: BatchPlan,
        order: SampleOrder,
        seed: int,
        total_steps: int,
        bytes_per_sample: int,
        announce: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.plan = plan
        self.in_blocks = isinstance(order, Order)
        self._order, self._seed, self._total_steps = order, seed, total_steps
        self._announce = announce
        bytes_per_step = max(1, bytes_per_sample * plan.global_size // plan.size)
        self.steps_per_group = max(1, min(_MOST_STEPS, _GROUP_BYTES // bytes_per_step))

    @property
    def samples_per_group(self) -> int:
        """The most samples that a group holds."""
        largest_lane = -(-self.plan.global_size // self.plan.lanes)
        return self.steps_per_group * len(self.plan.mine) * largest_lane

    def groups(self, start: int) -> Iterator[StepGroup]:
        """Yield the groups from a step on.

        The first is one step long, to be ready soon; sizes then double.
        """
        length = 1
        while start < self._total_steps:
            stop = min(start + _MOST_STEPS, self._epoch_end(start), self._total_steps)
            plans = [self.plan.step(step) for step in range(start, stop)]
            samples, draws = self._samples_of(plans)
            while plans:
                now, plans = plans[:length], plans[length:]
                sizes = [len(lane.places) for plan in now for lane in plan.lanes]
                count = sum(sizes)
                key = self._seed, now[0].epoch
                yield StepGroup(now, sizes, samples[:count], key, draws[:count])
                samples, draws = samples[count:], draws[count:]
                length = min(2 * length, self.steps_per_group)
            start = stop

    def _epoch_end(self, step: int) -> int:
        per_epoch = self.plan.steps_per_epoch
        return (step // per_epoch + 1) * per_epoch

    def _samples_of(self, plans: Sequence[StepPlan]) -> tuple[Places, Places]:
        """Look up the samples and draws of many steps at once: the permutation is faster on long arrays."""
        epoch = plans[0].epoch
        spans = joined([lane.places for plan in plans for lane in plan.lanes])
        places = numpy.concatenate([numpy.arange(span.start, span.stop) for span in spans])
        samples = self._order.at(places, self._seed, epoch)
        if self._announce is not None:
            self._announce(self._order.next_blocks(int(places[-1]), self._seed, epoch))
        return samples, places if self._order.repeats else samples


def joined(spans: list[range]) -> list[range]:
    """Return the same numbers in the same order, with adjacent spans merged.

    >>> joined([range(0, 2), range(2, 4), range(8, 9)])
    [range(0, 4), range(8, 9)]
    """
    merged = spans[:1]
    for span in spans[1:]:
        if span.start == merged[-1].stop:
            merged[-1] = range(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged
