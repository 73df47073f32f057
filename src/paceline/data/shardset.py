"""A set of shards as a source: samples are gathered from memory-mapped files, which are trusted only once they were summed."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.align import period_of, shift_of
from paceline.data.index import INDEX, LEAF_BYTES, OFFSETS, Column, ShardFacts
from paceline.data.order import Places
from paceline.data.region import Region
from paceline.data.room import Room, Rows, make_room
from paceline.data.shard import Layout, damaged, read_head
from paceline.data.shelf import Fetches, Shelf
from paceline.data.source import Batch
from paceline.errors import ConfigError, DataError

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64,
    "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class _Open:
    """A shard that is mapped."""

    facts: ShardFacts
    path: str
    layout: Layout


class ShardSet:
    """The samples of a set. Opening it reads the index alone; a shard is opened when a sample of it is asked for."""

    def __init__(self, shelf: Shelf, columns: Sequence[str] = ()) -> None:
        self._shelf, self.index = shelf, shelf.index()
        self.columns = _chosen(self.index.columns, columns, shelf.address)
        self.block = self.index.samples_per_shard
        self.window = 0
        self.bytes_per_sample = sum(column.item_bytes for column in self.columns if not column.varying)
        self._period = period_of(column.item_bytes for column in self.columns if not column.varying)
        sizes = [shard.size_bytes for shard in self.index.shards]
        ends = numpy.cumsum([(-(-size // self._period) + 1) * self._period for size in sizes])
        self._region = _region(int(ends[-1]), shelf.address)
        self._all = torch.from_numpy(self._region.bytes)
        self._at = numpy.concatenate([[0], ends[:-1]])
        self._in_rows = True
        self._rows: dict[int, Rows] = {}
        self._items: dict[int, Tensor] = {}
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._is_open = numpy.zeros(len(sizes), dtype=bool)
        # Where the first sample of the set would begin, if all lay in this shard: the byte, and the row.
        self._origins = {column.name: numpy.zeros(len(sizes), dtype=numpy.int64) for column in self.columns}
        self._first_rows = {column.name: numpy.zeros(len(sizes), dtype=numpy.int64) for column in self.columns}
        leaves = numpy.cumsum([0, *(shard.leaves for shard in self.index.shards)])
        heads = numpy.array([shard.head_bytes for shard in self.index.shards])
        self._first_leaf, self._first_data = leaves[:-1], self._at + heads
        self._summed = numpy.zeros(int(leaves[-1]), dtype=bool)
        self._to_sum = int(leaves[-1])
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return self.index.samples

    def __getitem__(self, sample: int) -> tuple[Tensor, ...]:
        """Return one sample, column by column; those of varying length are flat."""
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        shard, row = divmod(sample % len(self), self.block)
        with self._lock:
            self._need(numpy.array([shard]))
            return tuple(self._item(column, shard, row) for column in self.columns)

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return some samples, stacked."""
        return self.gather_into(samples, self.room_for(len(samples)))

    def room_for(self, count: int, *, pinned: bool = False) -> Room:
        """Return memory for so many samples."""
        for column in self.columns:
            if column.varying:
                raise ConfigError(
                    f"samples of column {column.name} differ in length, and cannot be stacked",
                    fix="give a transform that makes them alike, or choose other columns",
                )
        return make_room(count, ((_TYPES[column.dtype], column.shape) for column in self.columns), pinned=pinned)

    def gather_into(self, samples: Places, room: Room) -> Batch:
        """Copy some samples into memory that has room for at least as many; return the part that was filled."""
        shards = samples // self.block
        with self._lock:
            self._need(shards)
            for column, rows in zip(self.columns, room.rows, strict=True):
                if column.item_bytes:
                    self._copy(column, samples, shards, rows[: len(samples)])
        return room.first(len(samples))

    def expect(self, shards: Sequence[int]) -> None:
        """Have shards brought here that will be asked for next, where they are not."""
        if isinstance(self._shelf, Fetches):
            self._shelf.prefetch([self.index.shards[number] for number in shards if not self._is_open[number]])

    def _copy(self, column: Column, samples: Places, shards: Places, memory: Rows) -> None:
        size, origins = column.item_bytes, self._origins[column.name]
        if self._to_sum:
            self._trust(samples * size + origins.take(shards), size, shards)
        if self._in_rows:
            rows = samples + self._first_rows[column.name].take(shards)
            self._rows_of(size).take(rows, axis=0, out=memory, mode="clip")
        else:
            begins = torch.from_numpy(samples * size + origins.take(shards))
            torch.index_select(self._items_of(size), 0, begins, out=torch.from_numpy(memory))

    def _rows_of(self, size: int) -> Rows:
        """Return a view in which an item begins at every multiple of its size."""
        if size not in self._rows:
            count = len(self._region.bytes) // size
            self._rows[size] = self._region.bytes[: count * size].reshape(count, size)
        return self._rows[size]

    def _items_of(self, size: int) -> Tensor:
        """Return a view in which an item begins at every byte: slower, but it does not matter where shards lie."""
        if size not in self._items:
            self._items[size] = self._all.as_strided((len(self._all) - size + 1, size), (1, 1))
        return self._items[size]

    def _item(self, column: Column, shard: int, row: int) -> Tensor:
        begin = int(self._at[shard]) + self._open[shard].layout.begins[column.name]
        first, last, shape = row, row + 1, column.shape
        if column.varying:
            first, last = self._span(column, shard, row)
            shape = (last - first,)
        begin, size = begin + first * column.item_bytes, (last - first) * column.item_bytes
        if size:
            self._trust(numpy.array([begin]), size, numpy.array([shard]))
        return self._all[begin : begin + size].clone().view(_TYPES[column.dtype]).view(shape)

    def _span(self, column: Column, shard: int, row: int) -> tuple[int, int]:
        """Return where a sample of varying length lies among all of its shard, counted in elements."""
        layout, path = self._open[shard].layout, self._open[shard].path
        begin = int(self._at[shard]) + layout.begins[column.name + OFFSETS] + 8 * row
        self._trust(numpy.array([begin]), 16, numpy.array([shard]))
        first, last = self._region.bytes[begin : begin + 16].view("<i8").tolist()
        if not 0 <= first <= last <= layout.lengths[column.name]:
            raise damaged(path, f"sample {row} of {column.name} would lie at {first} to {last}")
        return first, last

    def _need(self, shards: Places) -> None:
        """Open the shards that are not."""
        if len(self._open) == len(self._is_open) or self._is_open.take(shards, mode="clip").all():
            return
        for number in numpy.unique(shards).tolist():
            if not self._is_open[number]:
                self._close_old(self.index.shards[number].size_bytes, keep=shards)
                self._open_shard(number)

    def _open_shard(self, number: int) -> None:
        try:
            self._map(number)
        except DataError:
            if not isinstance(self._shelf, Fetches):
                raise
            self._shelf.drop(self.index.shards[number])  # it was right when it came
            self._map(number)

    def _map(self, number: int) -> None:
        facts = self.index.shards[number]
        path, descriptor = self._fetch(facts)
        try:
            if os.fstat(descriptor).st_size != facts.size_bytes:
                raise damaged(str(path), f"{os.fstat(descriptor).st_size} bytes instead of {facts.size_bytes}")
            self._region.put(int(self._at[number]), descriptor, facts.size_bytes)
            head = self._region.bytes[self._at[number] : self._at[number] + facts.head_bytes].data
            layout = read_head(head, facts, self.index.columns, str(path))
            self._align(number, descriptor, layout)
        finally:
            os.close(descriptor)
        self._open[number] = _Open(facts, str(path), layout)
        for column in self.columns:
            begin = int(self._at[number]) + layout.begins[column.name]
            self._origins[column.name][number] = begin - number * self.block * column.item_bytes
            self._first_rows[column.name][number] = begin // max(1, column.item_bytes) - number * self.block
        self._is_open[number] = True

    def _align(self, number: int, descriptor: int, layout: Layout) -> None:
        """Move a shard that was mapped to where its columns are rows of one matrix with those of the others."""
        fixed = tuple((layout.begins[c.name], c.item_bytes) for c in self.columns if not c.varying and c.item_bytes)
        shift = shift_of(fixed, self._period)
        if shift is None:
            self._in_rows = False
            return
        facts, slot = self.index.shards[number], int(self._at[number]) // self._period * self._period
        if slot + shift != self._at[number]:
            self._region.take_out(int(self._at[number]), facts.size_bytes)
            self._region.put(slot + shift, descriptor, facts.size_bytes)
            self._at[number], self._first_data[number] = slot + shift, slot + shift + facts.head_bytes

    def _fetch(self, facts: ShardFacts) -> tuple[Path, int]:
        """Return the path of a shard, and an open file of it."""
        for last_try in (False, False, True):
            path = self._shelf.fetch(facts)
            try:
                return path, os.open(path, os.O_RDONLY)
            except OSError as error:
                if last_try or not isinstance(self._shelf, Fetches):  # another process may have needed its room
                    raise DataError(
                        f"cannot read {path}: {error.strerror}", fix="fetch or pack the set again"
                    ) from error
        raise AssertionError

    def _close_old(self, more_bytes: int, keep: Places) -> None:
        """Take out the shards that were opened first, where only so many may be here."""
        kept = set(keep.tolist())
        held = sum(shard.facts.size_bytes for shard in self._open.values())
        for number in [number for number in self._open if number not in kept] if self._shelf.room else []:
            if held + more_bytes <= self._shelf.room:
                return
            held -= self._open[number].facts.size_bytes
            self._close_shard(number)

    def _close_shard(self, number: int) -> None:
        facts = self._open.pop(number).facts
        self._is_open[number] = False
        self._region.take_out(int(self._at[number]), facts.size_bytes)
        mine = self._summed[self._first_leaf[number] : self._first_leaf[number] + facts.leaves]
        self._to_sum += int(mine.sum())
        mine[:] = False

    def _trust(self, begins: Places, size: int, shards: Places) -> None:
        """Sum what was not summed of the bytes that are to be read."""
        inside, first = begins - self._first_data[shards], self._first_leaf[shards]
        for step in [*range(0, size, LEAF_BYTES), size - 1]:
            leaves = first + (inside + step) // LEAF_BYTES
            if not self._summed[leaves].all():
                self._sum(numpy.unique(leaves[~self._summed[leaves]]))

    def _sum(self, leaves: NDArray[numpy.int64]) -> None:
        shards = numpy.searchsorted(self._first_leaf, leaves, side="right") - 1
        for leaf, shard in zip(leaves.tolist(), shards.tolist(), strict=True):
            right = self._is_right(leaf, shard)
            if not right and isinstance(self._shelf, Fetches):
                self._shelf.drop(self.index.shards[shard])  # it was right when it came
                self._close_shard(shard)
                self._open_shard(shard)  # at the same place, as it is the same file, and every byte was summed
                right = self._is_right(leaf, shard)
            if not right:
                where = (leaf - int(self._first_leaf[shard])) * LEAF_BYTES + self._open[shard].facts.head_bytes
                raise damaged(self._open[shard].path, f"its bytes from {where} on are not those that were written")
            self._summed[leaf] = True
            self._to_sum -= 1

    def _is_right(self, leaf: int, shard: int) -> bool:
        """Return whether the bytes of a leaf have the sum that was written down."""
        number = leaf - int(self._first_leaf[shard])
        begin = int(self._first_data[shard]) + number * LEAF_BYTES
        end = min(begin + LEAF_BYTES, int(self._at[shard]) + self._open[shard].facts.size_bytes)
        found = xxhash.xxh3_64_intdigest(self._region.bytes[begin:end].data)
        return bool(found == self._open[shard].layout.sums[number])


def _region(size: int, where: str) -> Region:
    try:
        return Region(size)
    except OSError as error:
        raise DataError(
            f"{INDEX} in {where} speaks of {size:,} bytes, for which there is no address space ({error.strerror})",
            fix="raise `ulimit -v`, or pack the set again",
        ) from error


def _chosen(columns: Sequence[Column], names: Sequence[str], where: str) -> tuple[Column, ...]:
    known = {column.name: column for column in columns}
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(f"{where} has no column {missing[0]}", fix=f"use one of: {', '.join(known)}")
    return tuple(known[name] for name in names) or tuple(columns)
