"""A dataset of shards as a source: samples come from verified, memory-mapped files."""

from __future__ import annotations

import hashlib
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
    """The samples of a dataset.

    Only the index is read at first; a shard is opened when one of its samples is needed.
    """

    def __init__(self, store: ShardStore, columns: Sequence[str] = ()) -> None:
        self._store, self.index = store, store.index()
        self.columns = _choose(self.index.columns, columns, store.address)
        self.block = self.index.samples_per_shard
        self.window = 0
        fixed = [column for column in self.columns if not column.varying]
        self.bytes_per_sample = sum(column.item_bytes for column in fixed)
        self._shards = MappedShards(store, self.index, self.columns)
        self._all = torch.from_numpy(self._shards.region.bytes)
        self._rows: dict[int, Rows] = {}
        self._items: dict[int, Tensor] = {}
        self._lock, self._owner = threading.RLock(), os.getpid()

    def __len__(self) -> int:
        return self.index.samples

    @property
    def digest(self) -> str:
        """The digest of the columns, and of the checksums of all shards in the index."""
        stored = repr((self.columns, self.index.shards))
        return hashlib.blake2b(stored.encode(), digest_size=8).hexdigest()

    def __getitem__(self, sample: int) -> tuple[Tensor, ...]:
        """Return one sample, column by column; columns of varying length are flat."""
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        shard, row = divmod(sample % len(self), self.block)
        with self._process_lock():
            self._shards.need(numpy.array([shard]))
            return tuple(self._item(column, shard, row) for column in self.columns)

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return samples, stacked."""
        return self.gather_into(samples, self.new_buffer(len(samples)))

    def new_buffer(self, count: int, *, pinned: bool = False) -> BatchBuffer:
        """Allocate a buffer for `count` samples."""
        columns = []
        for column in self.columns:
            if column.varying:
                raise ConfigError(
                    f"samples of column {column.name} differ in length and cannot be stacked",
                    fix="bring them to one length one by one (`each=` of open_dataset), or choose other columns",
                )
            columns.append((torch_dtypes()[column.dtype], column.shape))
        return allocate_buffer(count, columns, pinned=pinned)

    def gather_into(self, samples: Places, buffer: BatchBuffer) -> Batch:
        """Copy samples into a buffer that is large enough; return the part that was filled."""
        if len(samples) and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {len(self)}")
        shards = samples // self.block
        with self._process_lock():
            for turn in self._turns(shards):
                self._shards.need(shards[turn])
                for column, rows in zip(self.columns, buffer.rows, strict=True):
                    if column.item_bytes:
                        self._copy(column, samples[turn], shards[turn], rows[: len(samples)], turn)
        return buffer.first(len(samples))

    def vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary of a text dataset, if the index has one."""
        return vocabulary_of(self.index.about, self._store.read_file, self._store.address)

    def expect(self, shards: Sequence[int]) -> None:
        """Start to download shards that will be needed next."""
        if isinstance(self._store, FetchingStore):
            is_open = self._shards.is_open
            missing = [self.index.shards[number] for number in shards if not is_open[number]]
            self._store.prefetch(missing)

    def _process_lock(self) -> threading.RLock:
        """Return the lock of this process: a fork may have copied one that another thread held."""
        if self._owner != os.getpid():
            self._lock, self._owner = threading.RLock(), os.getpid()
            self._shards.reset()
        return self._lock

    def _turns(self, shards: Places) -> list[Places | slice]:
        """Split samples into turns whose shards fit into the store together."""
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
        self, column: Column, samples: Places, shards: Places, buffer: Rows, turn: Places | slice
    ) -> None:
        """Copy the samples of one turn to their rows of the buffer."""
        if not isinstance(turn, slice):
            part = numpy.empty((len(samples), column.item_bytes), dtype=numpy.uint8)
            self._copy(column, samples, shards, part, slice(None))
            buffer[turn] = part
            return
        size, origins = column.item_bytes, self._shards.origins[column.name]
        if self._shards.unverified:
            self._shards.verify(samples * size + origins.bytes.take(shards), size, shards)
        if self._shards.in_rows:
            rows = samples + origins.rows.take(shards)
            self._rows_of(size).take(rows, axis=0, out=buffer, mode="clip")
        else:
            begins = torch.from_numpy(samples * size + origins.bytes.take(shards))
            torch.index_select(self._items_of(size), 0, begins, out=torch.from_numpy(buffer))

    def _rows_of(self, size: int) -> Rows:
        """Return a view whose items begin at every multiple of their size."""
        if size not in self._rows:
            count = len(self._shards.region.bytes) // size
            self._rows[size] = self._shards.region.bytes[: count * size].reshape(count, size)
        return self._rows[size]

    def _items_of(self, size: int) -> Tensor:
        """Return a view whose items begin at every byte: slower, but it needs no alignment."""
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
            self._shards.verify(numpy.array([begin]), size, numpy.array([shard]))
        item = self._all[begin : begin + size].clone()
        return item.view(torch_dtypes()[column.dtype]).view(shape)

    def _span(self, column: Column, shard: int, row: int) -> tuple[int, int]:
        """Return where a sample of varying length begins and ends in its shard, in elements."""
        layout, path = self._shards.open[shard].layout, self._shards.open[shard].path
        begin = int(self._shards.at[shard]) + layout.begins[column.name + OFFSETS] + 8 * row
        self._shards.verify(numpy.array([begin]), 16, numpy.array([shard]))
        first, last = self._shards.region.bytes[begin : begin + 16].view("<i8").tolist()
        if not 0 <= first <= last <= layout.lengths[column.name]:
            raise damaged(path, f"sample {row} of {column.name} has offsets {first} to {last}")
        return first, last


def _choose(columns: Sequence[Column], names: Sequence[str], where: str) -> tuple[Column, ...]:
    by_name = {column.name: column for column in columns}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ConfigError(
            f"{where} has no column {missing[0]}", fix=f"use one of: {', '.join(by_name)}"
        )
    return tuple(by_name[name] for name in names) or tuple(columns)
