"""The ways to read samples: on demand, ahead in a thread, or in worker processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Protocol

import torch

from paceline.config.schema import ReadConfig
from paceline.data.reading.batch_buffer import BatchBuffer
from paceline.data.reading.nest import is_pinned
from paceline.data.reading.prefetch import prefetched
from paceline.data.reading.resident import copy_to_device
from paceline.data.reading.schedule import ReadSchedule, StepGroup
from paceline.data.reading.source import (
    Batch,
    DatasetSource,
    ReadsLanes,
    Source,
    SupportsGatherInto,
    gather_lane,
)
from paceline.data.reading.workers import LaneRequest, read_in_workers

GroupLanes = Generator[tuple[StepGroup, Iterator[Batch]]]
"""Groups of steps, each with its lanes, one after the other, on the device of the training."""


class Reader(Protocol):
    """One way to read the groups of a schedule."""

    def read(self, start: int) -> GroupLanes:
        """Yield every group from a step on.

        The caller is done with one when it asks for the next.
        """


class InlineReader:
    """Reads a group on demand: tensors in memory or on the GPU."""

    def __init__(self, source: Source, schedule: ReadSchedule, device: str) -> None:
        self._source, self._schedule = source, schedule
        self._copy = _CopyToDevice(device)

    def read(self, start: int) -> GroupLanes:
        """Yield every group from a step on."""
        for group in self._schedule.groups(start):
            batch = self._source.gather(group.samples, group.key)
            yield group, _split_lanes(group, self._copy.copy(batch))


class LaneReader:
    """Reads one lane at a time, on demand: datasets written in Python, without workers."""

    def __init__(self, source: Source, schedule: ReadSchedule, device: str) -> None:
        self._source, self._schedule = source, schedule
        self._copy = _CopyToDevice(device)

    def read(self, start: int) -> GroupLanes:
        """Yield every group from a step on."""
        for group in self._schedule.groups(start):
            yield group, self._lanes(group)

    def _lanes(self, group: StepGroup) -> Iterator[Batch]:
        lanes = zip(group.samples_by_lane(), group.draws_by_lane(), strict=True)
        for samples, draws in lanes:
            yield self._copy.copy(gather_lane(self._source, samples, group.key, draws))


class PrefetchReader:
    """Reads files in a thread, `prefetch_steps` ahead of the training."""

    def __init__(
        self, source: Source, schedule: ReadSchedule, device: str, prefetch_steps: int
    ) -> None:
        self._source, self._schedule = source, schedule
        self._depth = -(-prefetch_steps // schedule.steps_per_group)
        self._copy = _CopyToDevice(device)

    def read(self, start: int) -> GroupLanes:
        """Yield every group from a step on."""
        groups = self._schedule.groups(start)
        with contextlib.closing(prefetched(groups, self._gather(), self._depth)) as ready:
            for group, batch in ready:
                yield group, _split_lanes(group, self._copy.copy(batch))
                self._copy.wait()  # the next read may overwrite the buffer that was copied

    def _gather(self) -> Callable[[StepGroup, int], Batch]:
        """Return the function that reads a group into the buffer with a number."""
        return lambda group, _: self._source.gather(group.samples, group.key)


class BufferedPrefetchReader(PrefetchReader):
    """Reads files in a thread into buffers that are reused, pinned for a GPU."""

    def __init__(
        self,
        source: SupportsGatherInto,
        schedule: ReadSchedule,
        device: str,
        prefetch_steps: int,
    ) -> None:
        super().__init__(source, schedule, device, prefetch_steps)
        self._buffered, self._pinned = source, device != "cpu"

    def _gather(self) -> Callable[[StepGroup, int], Batch]:
        return partial(self._gather_into, [])

    def _gather_into(self, buffers: list[BatchBuffer], group: StepGroup, number: int) -> Batch:
        while len(buffers) <= number:
            count = self._schedule.samples_per_group
            buffers.append(self._buffered.new_buffer(count, pinned=self._pinned))
        return self._buffered.gather_into(group.samples, buffers[number])


class WorkerReader:
    """Has worker processes read lane after lane: for datasets written in Python."""

    def __init__(
        self, source: DatasetSource, schedule: ReadSchedule, device: str, config: ReadConfig
    ) -> None:
        self._source, self._schedule, self._device = source, schedule, device
        self._workers = config.workers
        self._lanes_ahead = len(schedule.plan.mine) * config.prefetch_steps

    def read(self, start: int) -> GroupLanes:
        """Yield every group from a step on."""
        requests = self._requests(start)
        lanes = read_in_workers(self._source, requests, self._workers, self._lanes_ahead)
        with contextlib.closing(lanes):
            on_device = (copy_to_device(None, lane, self._device) for lane in lanes)
            for group in self._schedule.groups(start):
                yield group, itertools.islice(on_device, len(group.lane_sizes))

    def _requests(self, start: int) -> Iterator[LaneRequest]:
        for group in self._schedule.groups(start):
            lanes = zip(group.samples_by_lane(), group.draws_by_lane(), strict=True)
            for samples, draws in lanes:
                yield samples, group.key, draws


def choose_reader(
    source: Source, schedule: ReadSchedule, device: str, config: ReadConfig
) -> Reader:
    """Return the reader that suits a source."""
    if isinstance(source, DatasetSource) and config.workers:
        return WorkerReader(source, schedule, device, config)
    if isinstance(source, ReadsLanes):
        return LaneReader(source, schedule, device)
    if not (source.block and schedule.in_blocks):
        return InlineReader(source, schedule, device)
    if isinstance(source, SupportsGatherInto):
        return BufferedPrefetchReader(source, schedule, device, config.prefetch_steps)
    return PrefetchReader(source, schedule, device, config.prefetch_steps)


class _CopyToDevice:
    """Copies batches to the device: from pinned memory while the device computes."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device != "cpu" else None  # type: ignore[no-untyped-call]

    def copy(self, batch: Batch) -> Batch:
        if self._stream is None:
            return batch
        stream = self._stream if is_pinned(batch) else None
        return copy_to_device(stream, batch, self._device)

    def wait(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


def _split_lanes(group: StepGroup, batch: Batch) -> Iterator[Batch]:
    columns = [tensor.split_with_sizes(group.lane_sizes) for tensor in batch]
    return zip(*columns, strict=True)
