"""An HDF5 file as a source: every chunk is read once per epoch."""

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
    """Samples that are rows of the datasets of a file, in the order of `columns`.

    The last is the target.

    A block is about a MB of whole chunks. It is decoded into memory when one of its samples
    is needed. Memory holds 2 x `window` blocks, and the least recently used one is evicted
    first. So a reader that needs the blocks of at most two windows at a time reads every
    chunk once. Each process opens the file itself.
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
        """Omit the open files of this process."""
        return self.__dict__ | {"_readers": {}}

    def __getitem__(self, sample: int) -> Batch:
        """Return one sample; its whole block is read and kept in memory."""
        return tuple(tensor[0] for tensor in self.gather(numpy.array([sample]), (0, 0)))

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return samples, stacked."""
        return self.gather_into(samples, self.new_buffer(len(samples)))

    def new_buffer(self, count: int, *, pinned: bool = False) -> BatchBuffer:
        """Allocate a buffer for `count` samples."""
        columns = ((getattr(torch, column.dtype), column.shape) for column in self.columns)
        return allocate_buffer(count, columns, pinned=pinned)

    def gather_into(self, samples: Places, buffer: BatchBuffer) -> Batch:
        """Copy samples into a buffer that is large enough; return the part that was filled."""
        if len(samples) and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {len(self)}")
        if len(samples) and self.bytes_per_sample:
            self._reader().copy(samples, [rows[: len(samples)] for rows in buffer.rows])
        return buffer.first(len(samples))

    def _reader(self) -> _Reader:
        """Return the reader of this process, which may be a fork of one that has a reader."""
        key = os.getpid(), self.window
        if key not in self._readers:
            blocks = -(-len(self) // self.block)
            slots = min(2 * self.window, blocks)
            _check_memory(slots * self.block * self.bytes_per_sample, self.window, self.path)
            self._readers.setdefault(key, _Reader(self.path, self.columns, self._plan, slots))
            for owner, reader in list(self._readers.items()):
                if owner != key:
                    reader.forget()
        return self._readers[key]


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

    def copy(self, samples: Places, buffers: Sequence[Rows]) -> None:
        """Copy samples into one buffer per column; missing blocks are read first."""
        with self._lock:
            if not self._arrays:
                self._open()
            blocks, firsts, block_of = numpy.unique(
                samples // self._plan.rows, return_index=True, return_inverse=True
            )
            order = self._reading_order(blocks, firsts)
            if len(order) <= self._slots:
                self._copy(samples, self._rows(samples, blocks, block_of, order), buffers)
                return
            for begin in range(0, len(order), self._slots):
                turn = order[begin : begin + self._slots]
                positions = numpy.flatnonzero(numpy.isin(block_of, turn))
                self._copy_turn(samples, blocks, block_of, turn, positions, buffers)

    def _copy_turn(
        self,
        samples: Places,
        blocks: Places,
        block_of: Places,
        turn: Places,
        positions: Places,
        buffers: Sequence[Rows],
    ) -> None:
        """Copy the samples at some positions, whose blocks fit into memory together."""
        samples, block_of = samples[positions], block_of[positions]
        count = len(positions)
        parts = [numpy.empty((count, *buffer.shape[1:]), dtype=numpy.uint8) for buffer in buffers]
        self._copy(samples, self._rows(samples, blocks, block_of, turn), parts)
        for buffer, part in zip(buffers, parts, strict=True):
            buffer[positions] = part

    def forget(self) -> None:
        """Free the memory.

        The file stays open: closing it in a fork would unlock it for the parent.
        """
        self._held.clear()
        self._free, self._arrays, self._memory = list(range(self._slots)), [], []

    def _reading_order(self, blocks: Places, firsts: Places) -> Places:
        """Return the order to use blocks in: first those in memory, before others evict them."""
        missing = numpy.array([int(block) not in self._held for block in blocks])
        return numpy.lexsort((firsts, missing))

    def _rows(self, samples: Places, blocks: Places, block_of: Places, turn: Places) -> Places:
        """Return the rows of samples in memory, after the blocks of this turn were read."""
        begins = numpy.zeros(len(blocks), dtype=numpy.int64)
        for number in turn:
            block = int(blocks[number])
            begins[number] = (self._slot(block) - block) * self._plan.rows
        rows: Places = samples + begins[block_of]
        return rows

    def _copy(self, samples: Places, rows: Places, buffers: Sequence[Rows]) -> None:
        for column, memory, buffer in zip(self._columns, self._memory, buffers, strict=True):
            if column.item_bytes:
                index = samples if column.name in self._plan.whole else rows
                memory.take(index, axis=0, out=buffer, mode="clip")

    def _slot(self, block: int) -> int:
        """Return the slot of a block in memory; read the block first if needed."""
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
    """Read rows of a column into the first rows of an array."""
    if end > begin and array.size:
        with reading(f"{column.name} of {path}, rows {begin} to {end - 1},"):
            dataset.read_direct(array, numpy.s_[begin:end], numpy.s_[: end - begin])


def _warn(columns: Sequence[H5Column], plan: Blocks, path: Path) -> None:
    """Print one line on rank 0 about the cost of a bad layout."""
    costs, fixes = [], []
    for column in columns:
        for problem in problems_of(column, path):
            if problem.here:
                costs.append(f"{column.name}: {problem.cost}")
                fixes.append(problem.fix)
    for name in plan.cut:
        span = f"chunks that span two blocks of {plan.rows:,} samples"
        costs.append(f"{name}: {span} are read twice")
    fixes.append("give all datasets chunks with the same number of rows")
    if costs and detect_world(os.environ).rank == 0:
        _say_once(f"warning: {path}: {'; '.join(costs)}; fix: {fixes[0]}")


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_memory(size_bytes: int, window: int, path: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > memory:
        smaller = max(1, window * memory // (2 * size_bytes))
        raise ConfigError(
            f"two windows of read.window={window} blocks of {path} take "
            f"{size_bytes / 1e9:,.1f} GB; this machine has {memory / 1e9:,.1f} GB",
            fix=f"set read.window={smaller} or less: every rank of a node needs this much memory",
        )
