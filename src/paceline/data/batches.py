"""This rank's lanes of the next steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import torch

from paceline.config import RunConfig
from paceline.data.order import samples_at
from paceline.data.source import Batch, as_source
from paceline.scale.batch import BatchPlan, StepPlan
from paceline.world.facts import World

_AHEAD_BYTES = 1 << 20  # about a core's cache: more steps at once save calls, but cost misses
_AHEAD_STEPS = 64


class Lane(NamedTuple):
    """One micro-batch, and how many of its samples count (none in a borrowed one)."""

    number: int
    batch: Batch
    samples: int


class Step(NamedTuple):
    """What this rank computes in one optimizer step."""

    plan: StepPlan
    lanes: list[Lane]


class Batches:
    """The steps of a run, from any step on, for this rank of this world."""

    def __init__(self, data: Any, config: RunConfig, world: World) -> None:
        self.source = as_source(data)
        self.plan = BatchPlan(len(self.source), config.batch.global_size, config.batch.lanes, world.rank, world.size)
        self.total_steps = config.steps or config.epochs * self.plan.steps_per_epoch
        self.total_samples = self.plan.seen_after(self.total_steps)
        self._seed = config.seed
        self._device = world.device
        per_step = max(1, self.source.bytes_per_sample * config.batch.global_size // world.size)
        self._ahead = max(1, min(_AHEAD_STEPS, _AHEAD_BYTES // per_step))

    def steps(self, start: int = 0) -> Iterator[Step]:
        """Yield every step from one on; nothing before it is read."""
        while start < self.total_steps:
            epoch_end = (start // self.plan.steps_per_epoch + 1) * self.plan.steps_per_epoch
            stop = min(start + self._ahead, epoch_end, self.total_steps)
            yield from self._read([self.plan.step(step) for step in range(start, stop)])
            start = stop

    def _read(self, plans: list[StepPlan]) -> Iterator[Step]:
        """Read several steps of one epoch with one gather, and cut it into lanes."""
        epoch = plans[0].epoch
        spans = [lane.places for plan in plans for lane in plan.lanes]
        places = numpy.concatenate([numpy.arange(span.start, span.stop) for span in joined(spans)])
        samples = samples_at(places, self.plan.samples, self._seed, epoch)
        whole = self.source.gather(samples, (self._seed, epoch))
        sizes = [len(span) for span in spans]
        pieces = zip(*(torch.split(tensor.to(self._device), sizes) for tensor in whole), strict=True)
        for plan in plans:
            yield Step(plan, [Lane(lane.lane, next(pieces), lane.samples) for lane in plan.lanes])


def joined(spans: list[range]) -> list[range]:
    """Return the same places in the same order, with spans that touch made one.

    >>> joined([range(0, 2), range(2, 4), range(8, 9)])
    [range(0, 4), range(8, 9)]
    """
    found = spans[:1]
    for span in spans[1:]:
        if span.start == found[-1].stop:
            found[-1] = range(found[-1].start, span.stop)
        else:
            found.append(span)
    return found
