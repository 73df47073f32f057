"""The batches of this rank, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from paceline.config import RunConfig
from paceline.data.order import Order
from paceline.data.reading.readers import choose_reader
from paceline.data.reading.resident import cache_on_gpu
from paceline.data.reading.schedule import ReadSchedule, StepGroup
from paceline.data.reading.source import Batch, Source, SupportsPrefetch, as_source
from paceline.data.reading.transform import Transformed
from paceline.scale.batch import BatchPlan, StepPlan
from paceline.world.world import World


class Lane(NamedTuple):
    """One micro-batch, and how many of its samples count: 0 in a lane without samples."""

    number: int
    batch: Batch
    samples: int


class RankBatch(NamedTuple):
    """The micro-batches of this rank for one optimizer step."""

    plan: StepPlan
    lanes: list[Lane]


class Batches:
    """The steps of a run for this rank, from any step on.

    Batches from files lie in buffers that later steps overwrite: copy a batch to keep it
    beyond its step.
    """

    def __init__(self, data: Any, config: RunConfig, world: World) -> None:
        self.source = as_source(data)
        self.plan = _plan(len(self.source), config, world)
        self.total_steps = config.steps or config.epochs * self.plan.steps_per_epoch
        self.total_samples = self.plan.seen_after(self.total_steps)
        self._transform = self.source if isinstance(self.source, Transformed) else None
        stored = self._transform.source if self._transform else self.source
        # From the stored blocks: the same bits with and without the GPU cache.
        order = Order(len(stored), stored.block or len(stored), config.read.window)
        source = cache_on_gpu(stored, world.device, config.read.resident_gb)
        source.window = config.read.window
        schedule = self._schedule(source, order, config.seed)
        self._reader = choose_reader(source, schedule, world.device, config.read)

    def steps(self, start: int = 0) -> Generator[RankBatch]:
        """Yield every step from one on; nothing before it is read."""
        with contextlib.closing(self._reader.read(start)) as groups:
            for group, lanes in groups:
                ready = lanes
                if self._transform is not None:
                    ready = _transformed(self._transform, group, lanes)
                for plan in group.plans:
                    yield _rank_batch(plan, ready)

    def _schedule(self, source: Source, order: Order, seed: int) -> ReadSchedule:
        announce = source.expect if isinstance(source, SupportsPrefetch) else None
        size = source.bytes_per_sample
        return ReadSchedule(self.plan, order, seed, self.total_steps, size, announce)


def _plan(samples: int, config: RunConfig, world: World) -> BatchPlan:
    blocks = config.local_sgd.replicas if config.local_sgd.steps else 0
    batch = config.batch
    return BatchPlan(samples, batch.global_size, batch.lanes, world.rank, world.size, blocks)


def _rank_batch(plan: StepPlan, batches: Iterator[Batch]) -> RankBatch:
    lanes = [Lane(lane.lane, next(batches), lane.samples) for lane in plan.lanes]
    return RankBatch(plan, lanes)


def _transformed(
    transform: Transformed, group: StepGroup, lanes: Iterator[Batch]
) -> Iterator[Batch]:
    for batch, samples in zip(lanes, group.samples_by_lane(), strict=True):
        yield transform.apply(batch, samples, group.key)
