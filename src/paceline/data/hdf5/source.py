"""An HDF5 file as a source, as it is: each chunk is read once in an epoch, and no more is kept than two windows hold."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from paceline.data.hdf5.chunks import BLOCK_BYTES, Blocks, check_size, plan_blocks, problems_of
from paceline.data.hdf5.file import (
    H5Column,
    check_chunks,
    columns_of,
    dataset_of,
    open_file,
    reading,
)
from paceline.data.order import Places
from paceline.data.reading.batch_buffer import BatchBuffer, Rows, allocate_buffer, as_rows
from paceline.data.reading.source import Batch
from paceline.errors import ConfigError
from paceline.world.detect import detect_world


class H5Source:
    """Samples that are rows of the datasets of a file, in the order of `columns`, the last of which is the target.

    A block is as many whole chunks as make about a MB. Blocks are decoded into memory when a sample of theirs is asked
    for. The memory holds 2 x `window` blocks; what was used longest ago makes room. Who goes through the blocks of one
    window after the other, or of two at a time, so reads every chunk once. Each process opens the file for itself.
    """

    def __init__(
        self, path: Path | str, columns: Sequence[str] = (), *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.path = Path(path)
        with open_file(self.path) as file:
            self.columns = columns_of(file, columns, self.path)
        self._plan = plan_blocks(self.columns, block_bytes)
        self.block = self._plan.rows
        self.window = 16
        self.bytes_per_sample = sum(column.item_bytes for column in self.columns)
        self._readers: dict[tuple[int, int], _Reader] = {}
        check_size(self.columns, self._plan, self.path)
        _warn(self.columns, self._plan, self.path)

    def __len__(self) -> int:
        return self.columns[0].rows

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return self.__dict__ | {"_readers": {}}

    def __getitem__(self, sample: int) -> Batch:
        """Return one sample; its whole block is read, and kept as others are."""
        return tuple(memory[0] for memory in self.gather(numpy.array([sample]), (0, 0)))

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return some samples, stacked."""
        return self.gather_into(samples, self.new_buffer(len(samples)))

    def new_buffer(self, count: int, *, pinned: bool = False) -> BatchBuffer:
        """Return memory for so many samples."""
        columns = ((getattr(torch, column.dtype), column.shape) for column in self.columns)
        return allocate_buffer(count, columns, pinned=pinned)

    def gather_into(self, samples: Places, room: BatchBuffer) -> Batch:
        """Copy some samples into memory that has room for at least as many; return the part that was filled."""
        if len(samples) and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {len(self)}")
        if len(samples) and self.bytes_per_sample:
            self._reader().copy(samples, [rows[: len(samples)] for rows in room.rows])
        return room.first(len(samples))

    def _reader(self) -> _Reader:
        """Return what reads for this process, which may be a fork of one that has read already."""
        mine = os.getpid(), self.window
        if mine not in self._readers:
            blocks = -(-len(self) // self.block)
            slots = min(2 * self.window, blocks)
            _check_memory(slots * self.block * self.bytes_per_sample, self.window, self.path)
            self._readers.setdefault(mine, _Reader(self.path, self.columns, self._plan, slots))
            for owner, reader in list(self._readers.items()):
                if owner != mine:
                    reader.forget()
        return self._readers[mine]


class _Reader:
    """The open file of one process, and the blocks that are in memory."""

    def __init__(self, path: Path, columns: Sequence[H5Column], plan: Blocks, slots: int) -> None:
        self._path, self._columns, self._plan, self._slots = path, columns, plan, slots
        self._lock = threading.Lock()
        self._held: OrderedDict[int, int] = OrderedDict()  # block -> slot, in order of use
        self._free = list(range(slots))
        self._arrays: list[NDArray[Any]] = []
        self._memory: list[Rows] = []
        self._file: Any = None
        self._datasets: list[Any] = []

    def copy(self, samples: Places, room: Sequence[Rows]) -> None:
        """Copy some samples to where they shall lie, after what is missing was read."""
        with self._lock:
            if not self._arrays:
                self._open()
            blocks, firsts, each = numpy.unique(
                samples // self._plan.rows, return_index=True, return_inverse=True
            )
            order = self._turns(blocks, firsts)
            if len(order) <= self._slots:
                self._copy(samples, self._rows(samples, blocks, each, order), room)
                return
            for begin in range(0, len(order), self._slots):
                turn = order[begin : begin + self._slots]
                places = numpy.flatnonzero(numpy.isin(each, turn))
                part = [
                    numpy.empty((len(places), *memory.shape[1:]), dtype=numpy.uint8)
                    for memory in room
                ]
                self._copy(
                    samples[places], self._rows(samples[places], blocks, each[places], turn), part
                )
                for memory, rows in zip(room, part, strict=True):
                    memory[places] = rows

    def forget(self) -> None:
        """Give the memory back. The file stays open: where this is a fork, to close it would unlock it for the parent."""
        self._held.clear()
        self._free, self._arrays, self._memory = list(range(self._slots)), [], []

    def _turns(self, blocks: Places, firsts: Places) -> Places:
        """Return the numbers of some blocks as they shall be used: those in memory before others take their place."""
        missing = numpy.array([int(block) not in self._held for block in blocks])
        return numpy.lexsort((firsts, missing))

    def _rows(self, samples: Places, blocks: Places, each: Places, turn: Places) -> Places:
        """Return where samples lie in memory; each belongs to one of the blocks, and those whose turn it is are needed."""
        begins = numpy.zeros(len(blocks), dtype=numpy.int64)
        for number in turn:
            block = int(blocks[number])
            begins[number] = (self._slot(block) - block) * self._plan.rows
        rows: Places = samples + begins[each]
        return rows

    def _copy(self, samples: Places, rows: Places, room: Sequence[Rows]) -> None:
        for column, memory, filled in zip(self._columns, self._memory, room, strict=True):
            if column.item_bytes:
                index = samples if column.name in self._plan.whole else rows
                memory.take(index, axis=0, out=filled, mode="clip")

    def _slot(self, block: int) -> int:
        """Return where a block lies in memory, after it was read if need be."""
        if block in self._held:
            self._held.move_to_end(block)
            return self._held[block]
        if not self._free:
            self._free.append(self._held.popitem(last=False)[1])
        slot, begin = self._free[-1], block * self._plan.rows
        for column, dataset, array in zip(self._columns, self._datasets, self._arrays, strict=True):
            if column.name not in self._plan.whole:
                end = min(begin + self._plan.rows, column.rows)
                read_rows(dataset, column, begin, end, array[slot * self._plan.rows :], self._path)
        self._held[block] = self._free.pop()
        return slot

    def _open(self) -> None:
        spread = [column.chunk_bytes for column in self._columns if column.chunks_per_sample > 1]
        self._file = open_file(self._path, cache_bytes=max(spread, default=0))
        self._datasets = [dataset_of(self._file, column, self._path) for column in self._columns]
        for column, dataset in zip(self._columns, self._datasets, strict=True):
            check_chunks(dataset, column, self._path)
        arrays = [self._array(column) for column in self._columns]
        for column, dataset, array in zip(self._columns, self._datasets, arrays, strict=True):
            if column.name in self._plan.whole:
                read_rows(dataset, column, 0, column.rows, array, self._path)
        self._memory = [as_rows(array, len(array)) for array in arrays]
        self._arrays = arrays

    def _array(self, column: H5Column) -> NDArray[Any]:
        rows = column.rows if column.name in self._plan.whole else self._slots * self._plan.rows
        return numpy.empty((rows, *column.shape), dtype=column.dtype)


def read_rows(
    dataset: Any, column: H5Column, begin: int, end: int, array: NDArray[Any], path: Path
) -> None:
    """Read some rows of a column into the first rows of an array."""
    if end > begin and array.size:
        with reading(f"{column.name} of {path}, rows {begin} to {end - 1},"):
            dataset.read_direct(array, numpy.s_[begin:end], numpy.s_[: end - begin])


def _warn(columns: Sequence[H5Column], plan: Blocks, path: Path) -> None:
    """Say in one line, on one rank, what a bad layout costs."""
    found = [
        (column.name, problem)
        for column in columns
        for problem in problems_of(column, path)
        if problem.here
    ]
    costs = [f"{name}: {problem.cost}" for name, problem in found]
    costs += [
        f"{name}: chunks that lie in two blocks of {plan.rows:,} samples are read twice"
        for name in plan.cut
    ]
    if costs and detect_world(os.environ).rank == 0:
        fix = next(
            (problem.fix for _, problem in found), "give all datasets chunks of as many rows"
        )
        _say_once(f"warning: {path}: {'; '.join(costs)}; better: {fix}")


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_memory(size_bytes: int, window: int, path: Path) -> None:
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > here:
        raise ConfigError(
            f"two windows of read.window={window} blocks of {path} take {size_bytes / 1e9:,.1f} GB; this machine has {here / 1e9:,.1f} GB",
            fix=f"set read.window={max(1, window * here // (2 * size_bytes))}, or less, as all ranks of a node need as much",
        )
