"""This rank's lanes of the next steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import numpy
import torch

from paceline.config import RunConfig
from paceline.data.order import Order, Places
from paceline.data.reading.batch_buffer import BatchBuffer
from paceline.data.reading.prefetch import prefetched
from paceline.data.reading.resident import cache_on_gpu, copy_to_gpu
from paceline.data.reading.source import (
    Batch,
    DatasetSource,
    SupportsGatherInto,
    SupportsPrefetch,
    as_source,
)
from paceline.data.reading.transform import Transformed
from paceline.data.reading.workers import read_in_workers
from paceline.scale.batch import BatchPlan, StepPlan
from paceline.world.world import World

_TOGETHER_BYTES = (
    1 << 24
)  # what is read at once: the more, the less a step costs beside its bytes (docs/notes.md)
_TOGETHER_STEPS = 64


class Lane(NamedTuple):
    """One micro-batch, and how many of its samples count (none in a borrowed one)."""

    number: int
    batch: Batch
    samples: int


class RankBatch(NamedTuple):
    """What this rank computes in one optimizer step."""

    plan: StepPlan
    lanes: list[Lane]


class Readahead(NamedTuple):
    """Some steps of one epoch that are read together."""

    plans: list[StepPlan]
    sizes: list[int]
    """How many samples each lane has."""
    samples: Places


class Batches:
    """The steps of a run, from any step on, for this rank of this world.

    A batch that comes from files lies in memory that is used again: whoever keeps one beyond its step must copy it.
    """

    def __init__(self, data: Any, config: RunConfig, world: World) -> None:
        self.source = as_source(data)
        self._transform = self.source if isinstance(self.source, Transformed) else None
        reads = self._transform.source if self._transform else self.source
        block = reads.block or len(self.source)
        self._reads = cast("Any", cache_on_gpu(reads, world.device, config.read.resident_gb))
        self._side = torch.cuda.Stream(world.device) if world.device != "cpu" else None  # type: ignore[no-untyped-call]
        blocks = config.local_sgd.replicas if config.local_sgd.steps else 0
        self.plan = BatchPlan(
            len(self.source),
            config.batch.global_size,
            config.batch.lanes,
            world.rank,
            world.size,
            blocks,
        )
        self.total_steps = config.steps or config.epochs * self.plan.steps_per_epoch
        self.total_samples = self.plan.seen_after(self.total_steps)
        self._seed, self._read, self._device = config.seed, config.read, world.device
        self._order = Order(len(self.source), block, config.read.window)
        self._reads.window = config.read.window
        self._expects = isinstance(self._reads, SupportsPrefetch)
        self._most_in_a_step = len(self.plan.mine) * -(
            -config.batch.global_size // config.batch.lanes
        )
        per_step = max(1, self._reads.bytes_per_sample * config.batch.global_size // world.size)
        self._together = max(1, min(_TOGETHER_STEPS, _TOGETHER_BYTES // per_step))

    def steps(self, start: int = 0) -> Generator[RankBatch]:
        """Yield every step from one on; nothing before it is read."""
        with contextlib.closing(self._filled(start)) as pieces:
            for piece, lanes in pieces:
                yield from self._cut(piece, lanes)

    def _pieces(self, start: int) -> Iterator[Readahead]:
        """Yield what is to be read: the order is found for many steps at once, of which some are read together.

        The first piece is one step, so that nobody waits for more, and each next one may be twice as long.
        """
        together = 1
        while start < self.total_steps:
            epoch_end = (start // self.plan.steps_per_epoch + 1) * self.plan.steps_per_epoch
            stop = min(start + _TOGETHER_STEPS, epoch_end, self.total_steps)
            plans = [self.plan.step(step) for step in range(start, stop)]
            spans = joined([lane.places for plan in plans for lane in plan.lanes])
            places = numpy.concatenate([numpy.arange(span.start, span.stop) for span in spans])
            samples = self._order.at(places, self._seed, plans[0].epoch)
            if self._expects:
                self._reads.expect(
                    self._order.next_blocks(int(places[-1]), self._seed, plans[0].epoch)
                )
            while plans:
                sizes = [len(lane.places) for plan in plans[:together] for lane in plan.lanes]
                count = sum(sizes)
                yield Readahead(plans[:together], sizes, samples[:count])
                plans, samples = plans[together:], samples[count:]
                together = min(2 * together, self._together)
            start = stop

    def _filled(self, start: int) -> Generator[tuple[Readahead, Iterator[Batch]]]:
        """Read pieces in the way that suits the source."""
        pieces = self._pieces(start)
        in_python = isinstance(self._reads, DatasetSource)
        if in_python and self._read.workers:
            yield from self._by_workers(start)
        elif self._reads.block and not in_python and not isinstance(self._reads, Transformed):
            depth = -(-self._read.prefetch_steps // self._together)
            read = (
                partial(self._fill, [])
                if isinstance(self._reads, SupportsGatherInto)
                else self._gather
            )
            with contextlib.closing(prefetched(pieces, read, depth)) as ready:
                for piece, whole in ready:
                    yield piece, self._lanes(piece, whole)
                    if self._side is not None:
                        self._side.synchronize()  # the memory that was copied from may now be filled again
        else:
            for piece in pieces:
                yield piece, self._lanes(piece, self._gather(piece))

    def _gather(self, piece: Readahead, _place: int = 0) -> Batch:
        found: Batch = self._reads.gather(piece.samples, self._key(piece))
        return found

    def _fill(self, rooms: list[BatchBuffer], piece: Readahead, place: int) -> Batch:
        """Read a piece into memory that is used again."""
        while len(rooms) <= place:
            rooms.append(
                self._reads.new_buffer(
                    self._together * self._most_in_a_step, pinned=self._device != "cpu"
                )
            )
        found: Batch = self._reads.gather_into(piece.samples, rooms[place])
        return found

    def _by_workers(self, start: int) -> Iterator[tuple[Readahead, Iterator[Batch]]]:
        """Have other processes read lane after lane."""
        mine = len(self.plan.step(start).lanes) if start < self.total_steps else 1
        wanted = (
            (samples, self._key(piece))
            for piece in self._pieces(start)
            for samples in numpy.split(piece.samples, numpy.cumsum(piece.sizes)[:-1])
        )
        lanes = read_in_workers(
            self._reads, wanted, self._read.workers, mine * self._read.prefetch_steps
        )
        with contextlib.closing(lanes):
            here = (tuple(tensor.to(self._device) for tensor in lane) for lane in lanes)
            for piece in self._pieces(start):
                yield piece, itertools.islice(here, len(piece.sizes))

    def _lanes(self, piece: Readahead, whole: Batch) -> Iterator[Batch]:
        if self._device != "cpu":
            side = self._side if all(tensor.is_pinned() for tensor in whole) else None
            whole = copy_to_gpu(side, whole, self._device)
        return zip(*(tensor.split_with_sizes(piece.sizes) for tensor in whole), strict=True)

    def _cut(self, piece: Readahead, lanes: Iterator[Batch]) -> Iterator[RankBatch]:
        """Make steps of what was read."""
        if self._transform is not None:
            lanes = self._transformed(self._transform, piece, lanes)
        for plan in piece.plans:
            yield RankBatch(
                plan, [Lane(lane.lane, next(lanes), lane.samples) for lane in plan.lanes]
            )

    def _transformed(
        self, transform: Transformed, piece: Readahead, lanes: Iterator[Batch]
    ) -> Iterator[Batch]:
        ends = numpy.cumsum(piece.sizes)[:-1]
        for batch, samples in zip(lanes, numpy.split(piece.samples, ends), strict=True):
            yield transform.apply(batch, samples, self._key(piece))

    def _key(self, piece: Readahead) -> tuple[int, int]:
        return self._seed, piece.plans[0].epoch


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
