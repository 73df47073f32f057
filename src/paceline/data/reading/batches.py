"""The batches of this rank, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline.config.given import is_given, with_values
from paceline.data.order import Order
from paceline.data.reading.collate import Collate
from paceline.data.reading.comparison import DataFacts, read_facts
from paceline.data.reading.dataloader import LoaderSettings
from paceline.data.reading.readers import Reader, choose_reader
from paceline.data.reading.resident import cache_on_gpu
from paceline.data.reading.schedule import ReadSchedule, StepGroup
from paceline.data.reading.source import (
    Batch,
    DatasetSource,
    Sampled,
    Source,
    SupportsPrefetch,
    TensorSource,
    as_source,
)
from paceline.data.reading.stream import Stream, StreamReader
from paceline.data.reading.transform import Transformed
from paceline.data.sampling import ComposedOrder, LengthOrder, SampleOrder
from paceline.errors import ConfigError
from paceline.scale.batch import BatchPlan, LaneChoice, StepPlan
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

    `data`: tensors, a map-style dataset, shards, HDF5, a torch DataLoader or a Stream.
    `collate(samples)` makes a batch of the samples of one lane.
    `choice`: a step in which the ranks run other lanes than usual.

    Batches from files lie in buffers that later steps overwrite: copy a batch to keep it
    beyond its step.
    """

    def __init__(
        self,
        data: Any,
        config: RunConfig,
        world: World,
        *,
        collate: Collate | None = None,
        choice: LaneChoice | None = None,
    ) -> None:
        loader = LoaderSettings.of(data) if isinstance(data, DataLoader) else None
        self.config = config if loader is None else loader.apply(config)
        """The config, with the batch size and the workers of a DataLoader."""
        self.config = _with_length_batches(data, self.config)
        self._world = world
        self._transform: Transformed | None = None
        self.source: Source | Stream
        if isinstance(data, Stream):
            self.source, samples = data, data.samples_per_epoch(self.config)
        else:
            self.source = as_source(data, collate)
            drop_last = loader is not None and loader.drop_last
            samples = _whole_steps(len(self.source), self.config, drop_last=drop_last)
        self.dataset_samples = samples
        """Samples of the dataset; 0 for a stream of unknown length."""
        if isinstance(data, Stream) and data.is_endless:
            self.dataset_samples = 0
        if isinstance(data, Stream):
            choice = None  # a lane of a stream stays with the rank that reads its shard
        self.plan = _plan(samples, self.config, world, choice)
        self.total_steps = self.config.steps or config.epochs * self.plan.steps_per_epoch
        self.total_samples = self.plan.seen_after(
            self.total_steps
        )  # of learning rates: of whole epochs
        self.cut_to = _steps_to_keep(self.plan.steps_per_epoch, self.total_steps, self.config)
        """Steps to which `paceline verify` cuts every epoch, to reach the end of one soon; 0: epochs are whole."""
        if self.cut_to:
            epochs = -(-self.total_steps // self.plan.steps_per_epoch)
            left_out = (self.plan.steps_per_epoch - self.cut_to) * self.plan.global_size
            self.plan = _plan(samples - left_out, self.config, world, choice)
            self.total_steps = min(self.total_steps, epochs * self.cut_to)
        self.description = _describe(data, self.source, samples)
        if loader is not None:
            self.description = loader.description(self.config, collate)
        self.is_notable = loader is not None or isinstance(self.source, Sampled | Stream)
        """Whether the description says more than the number of samples."""
        self.may_use_workers = False
        """Whether worker processes can read the data: a dataset written in Python."""
        self._reader = self._choose_reader(collate)
        self.facts: DataFacts | None = None
        """What is compared of the dataset between ranks and starts, once it was read; None for a stream."""

    def read_facts(self) -> DataFacts | None:
        """Read what is compared of the dataset."""
        if not isinstance(self.source, Stream):
            stored, order = ordered(self.source, self.config)
            self.facts = read_facts(stored, order, self.config.seed, self.config.read.workers)
        return self.facts

    def steps(self, start: int = 0) -> Generator[RankBatch]:
        """Yield every step from one on; nothing before it is read, except from a stream."""
        with contextlib.closing(self._reader.read(start)) as groups:
            for group, lanes in groups:
                ready = lanes
                if self._transform is not None:
                    ready = _transformed(self._transform, group, lanes)
                for plan in group.plans:
                    yield _rank_batch(plan, ready)

    def forget_epoch(self) -> None:
        """Call the dataset's `set_epoch` before the next sample: an evaluation may have called it."""
        source = self.source
        while isinstance(source, Sampled | Transformed):
            source = source.source
        if isinstance(source, DatasetSource):
            source.forget_epoch()

    def _choose_reader(self, collate: Collate | None) -> Reader:
        config, device = self.config, self._world.device
        if isinstance(self.source, Stream):
            return StreamReader(
                self.source, self.plan, self.total_steps, config.seed, device, collate
            )
        stored, order = ordered(self.source, config)
        self._transform = _unwrap(self.source)[2]
        self.may_use_workers = isinstance(stored, DatasetSource)
        source = cache_on_gpu(stored, device, config.read.resident_gb)
        source.window = config.read.window
        return choose_reader(source, self._schedule(source, order), device, config.read)

    def _schedule(self, source: Source, order: SampleOrder) -> ReadSchedule:
        announce = source.expect if isinstance(source, SupportsPrefetch) else None
        size = source.bytes_per_sample
        return ReadSchedule(self.plan, order, self.config.seed, self.total_steps, size, announce)


def _with_length_batches(data: Any, config: RunConfig) -> RunConfig:
    """Return the config with the batch size of `by_length`, unless one is given; raise if that cuts its batches."""
    source = data.dataset if isinstance(data, DataLoader) else data
    while isinstance(source, Transformed):
        source = source.source
    if not isinstance(source, Sampled) or not isinstance(source.order, LengthOrder):
        return config
    size, asked = config.batch.global_size, source.order.batch
    if size % asked == 0 and (size == asked or is_given(config, "batch.global_size")):
        return config  # several batches of similar length make a step
    if isinstance(data, DataLoader) or is_given(config, "batch.global_size"):
        raise ConfigError(
            f"by_length makes batches of {asked} samples, and a step has {size}",
            fix=f"pass batch={size} to by_length, or set batch.global_size={asked}",
        )
    return with_values(config, batch=replace(config.batch, global_size=asked))


def ordered(source: Source, config: RunConfig) -> tuple[Source, SampleOrder]:
    """Return the stored samples and their order."""
    stored, order, _ = _unwrap(source)
    # From the stored blocks: the same bits with and without the GPU cache.
    return stored, order or Order(len(stored), stored.block or len(stored), config.read.window)


def _unwrap(source: Source) -> tuple[Source, SampleOrder | None, Transformed | None]:
    """Return the stored samples, their order, and the transform of whole lanes."""
    order: SampleOrder | None = None
    transform: Transformed | None = None
    while True:
        if isinstance(source, Sampled):
            order = source.order if order is None else ComposedOrder(order, source.order)
            source = source.source
        elif isinstance(source, Transformed) and transform is None:
            transform, source = source, source.source
        else:
            return source, order, transform


def _plan(samples: int, config: RunConfig, world: World, choice: LaneChoice | None) -> BatchPlan:
    blocks = config.local_sgd.replicas if config.local_sgd.steps else 0
    batch = config.batch
    return BatchPlan(
        samples, batch.global_size, batch.lanes, world.rank, world.size, blocks, choice
    )


def _steps_to_keep(per_epoch: int, total_steps: int, config: RunConfig) -> int:
    """Return how many steps of an epoch a recorded run takes; 0: all, as when it ends within the first epoch."""
    wanted = config.record.epoch_steps
    return wanted if wanted and wanted < per_epoch < total_steps else 0


def _whole_steps(samples: int, config: RunConfig, *, drop_last: bool) -> int:
    """Return the samples of an epoch: with drop_last, without those of a short last step."""
    size = config.batch.global_size
    if not drop_last:
        return samples
    if samples < size:
        raise ConfigError(
            f"drop_last leaves nothing of {samples} samples in batches of {size}",
            fix=f"set batch_size={samples} or less, or drop_last=False",
        )
    return samples - samples % size


def _describe(data: Any, source: Source | Stream, samples: int) -> str:
    if isinstance(source, Sampled):
        return source.description
    name = type(data).__name__
    if isinstance(source, Stream):
        name = "Stream: one shard per lane"
    elif isinstance(source, TensorSource):
        name = "tensors"
    return f"{name}, {samples:,} samples per epoch"


def _rank_batch(plan: StepPlan, batches: Iterator[Batch]) -> RankBatch:
    lanes = [Lane(lane.lane, next(batches), lane.samples) for lane in plan.lanes]
    return RankBatch(plan, lanes)


def _transformed(
    transform: Transformed, group: StepGroup, lanes: Iterator[Batch]
) -> Iterator[Batch]:
    for batch, draws in zip(lanes, group.draws_by_lane(), strict=True):
        yield transform.apply(batch, draws, group.key)
