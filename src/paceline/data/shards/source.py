"""A set of shards as a source: samples are gathered from memory-mapped files, which are trusted only once they were summed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from paceline.data.order import Places
from paceline.data.reading.batch_buffer import BatchBuffer, Rows, allocate_buffer
from paceline.data.reading.source import Batch
from paceline.data.shards.index import OFFSETS, Column
from paceline.data.shards.mmap import MappedShards
from paceline.data.shards.shard import damaged
from paceline.data.shards.store import FetchingStore, ShardStore
from paceline.data.vocabulary import Vocabulary, vocabulary_of
from paceline.dtypes import torch_dtypes
from paceline.errors import ConfigError


class ShardSource:
    """The samples of a set. Opening it reads the index alone; a shard is opened when a sample of it is asked for."""

    def __init__(self, store: ShardStore, columns: Sequence[str] = ()) -> None:
        self._store, self.index = store, store.index()
        self.columns = _chosen(self.index.columns, columns, store.address)
        self.block = self.index.samples_per_shard
        self.window = 0
        self.bytes_per_sample = sum(
            column.item_bytes for column in self.columns if not column.varying
        )
        self._shards = MappedShards(store, self.index, self.columns)
        self._all = torch.from_numpy(self._shards.region.bytes)
        self._rows: dict[int, Rows] = {}
        self._items: dict[int, Tensor] = {}
        self._lock, self._owner = threading.RLock(), os.getpid()

    def __len__(self) -> int:
        return self.index.samples

    def __getitem__(self, sample: int) -> tuple[Tensor, ...]:
        """Return one sample, column by column; those of varying length are flat."""
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        shard, row = divmod(sample % len(self), self.block)
        with self._here():
            self._shards.need(numpy.array([shard]))
            return tuple(self._item(column, shard, row) for column in self.columns)

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return some samples, stacked."""
        return self.gather_into(samples, self.new_buffer(len(samples)))

    def new_buffer(self, count: int, *, pinned: bool = False) -> BatchBuffer:
        """Return memory for so many samples."""
        for column in self.columns:
            if column.varying:
                raise ConfigError(
                    f"samples of column {column.name} differ in length, and cannot be stacked",
                    fix="make them alike one by one (`each=` of open_dataset), or choose other columns",
                )
        return allocate_buffer(
            count,
            ((torch_dtypes()[column.dtype], column.shape) for column in self.columns),
            pinned=pinned,
        )

    def gather_into(self, samples: Places, room: BatchBuffer) -> Batch:
        """Copy some samples into memory that has room for at least as many; return the part that was filled."""
        if len(samples) and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {len(self)}")
        shards = samples // self.block
        with self._here():
            for turn in self._turns(shards):
                self._shards.need(shards[turn])
                for column, rows in zip(self.columns, room.rows, strict=True):
                    if column.item_bytes:
                        self._copy(column, samples[turn], shards[turn], rows[: len(samples)], turn)
        return room.first(len(samples))

    def vocabulary(self) -> Vocabulary | None:
        """Return what the numbers of a text stand for, if the index says it."""
        return vocabulary_of(self.index.about, self._store.read_file, self._store.address)

    def expect(self, shards: Sequence[int]) -> None:
        """Have shards brought here that will be asked for next, where they are not."""
        if isinstance(self._store, FetchingStore):
            self._store.prefetch(
                [self.index.shards[number] for number in shards if not self._shards.is_open[number]]
            )

    def _here(self) -> threading.RLock:
        """Return the lock of this process: a fork may have been made while another thread held it, and was half done."""
        if self._owner != os.getpid():
            self._lock, self._owner = threading.RLock(), os.getpid()
            self._shards.begin_anew()
        return self._lock

    def _turns(self, shards: Places) -> list[Places | slice]:
        """Return which samples are read together: all, unless there is no room for so many shards at a time."""
        if not self._store.capacity_bytes:
            return [slice(None)]
        needed = numpy.unique(shards)
        sizes = numpy.array([self.index.shards[number].size_bytes for number in needed.tolist()])
        turns = (numpy.cumsum(sizes) - 1) // max(self._store.capacity_bytes, 1)
        if not len(turns) or turns[-1] == 0:
            return [slice(None)]
        return [
            numpy.flatnonzero(numpy.isin(shards, needed[turns == turn]))
            for turn in numpy.unique(turns)
        ]

    def _copy(
        self, column: Column, samples: Places, shards: Places, memory: Rows, turn: Places | slice
    ) -> None:
        """Copy the samples of one turn to their places in memory."""
        if not isinstance(turn, slice):
            part = numpy.empty((len(samples), column.item_bytes), dtype=numpy.uint8)
            self._copy(column, samples, shards, part, slice(None))
            memory[turn] = part
            return
        size, origins = column.item_bytes, self._shards.origins[column.name]
        if self._shards.to_sum:
            self._shards.trust(samples * size + origins.take(shards), size, shards)
        if self._shards.in_rows:
            rows = samples + self._shards.first_rows[column.name].take(shards)
            self._rows_of(size).take(rows, axis=0, out=memory, mode="clip")
        else:
            begins = torch.from_numpy(samples * size + origins.take(shards))
            torch.index_select(self._items_of(size), 0, begins, out=torch.from_numpy(memory))

    def _rows_of(self, size: int) -> Rows:
        """Return a view in which an item begins at every multiple of its size."""
        if size not in self._rows:
            count = len(self._shards.region.bytes) // size
            self._rows[size] = self._shards.region.bytes[: count * size].reshape(count, size)
        return self._rows[size]

    def _items_of(self, size: int) -> Tensor:
        """Return a view in which an item begins at every byte: slower, but it does not matter where shards lie."""
        if size not in self._items:
            self._items[size] = self._all.as_strided((len(self._all) - size + 1, size), (1, 1))
        return self._items[size]

    def _item(self, column: Column, shard: int, row: int) -> Tensor:
        begin = int(self._shards.at[shard]) + self._shards.open[shard].layout.begins[column.name]
        first, last, shape = row, row + 1, column.shape
        if column.varying:
            first, last = self._span(column, shard, row)
            shape = (last - first,)
        begin, size = begin + first * column.item_bytes, (last - first) * column.item_bytes
        if size:
            self._shards.trust(numpy.array([begin]), size, numpy.array([shard]))
        return (
            self._all[begin : begin + size].clone().view(torch_dtypes()[column.dtype]).view(shape)
        )

    def _span(self, column: Column, shard: int, row: int) -> tuple[int, int]:
        """Return where a sample of varying length lies among all of its shard, counted in elements."""
        layout, path = self._shards.open[shard].layout, self._shards.open[shard].path
        begin = int(self._shards.at[shard]) + layout.begins[column.name + OFFSETS] + 8 * row
        self._shards.trust(numpy.array([begin]), 16, numpy.array([shard]))
        first, last = self._shards.region.bytes[begin : begin + 16].view("<i8").tolist()
        if not 0 <= first <= last <= layout.lengths[column.name]:
            raise damaged(path, f"sample {row} of {column.name} would lie at {first} to {last}")
        return first, last


def _chosen(columns: Sequence[Column], names: Sequence[str], where: str) -> tuple[Column, ...]:
    known = {column.name: column for column in columns}
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"{where} has no column {missing[0]}", fix=f"use one of: {', '.join(known)}"
        )
    return tuple(known[name] for name in names) or tuple(columns)
