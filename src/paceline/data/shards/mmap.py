"""The shards of a set that are mapped: where they lie, and which of their bytes were found to be right."""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import xxhash
from numpy.typing import NDArray

from paceline.data.order import Places
from paceline.data.safe_open import open_plain
from paceline.data.shards.address_space import Region
from paceline.data.shards.alignment import period_of, shift_of
from paceline.data.shards.index import INDEX, LEAF_BYTES, Column, DatasetIndex, ShardFacts
from paceline.data.shards.shard import Layout, damaged, read_head
from paceline.data.shards.store import FetchingStore, ShardStore
from paceline.errors import DataError

_MOST_OPEN = 1 << 14  # each takes two of the 65,530 mappings that Linux gives a process


@dataclass(frozen=True)
class Mapped:
    """A shard that is mapped."""

    facts: ShardFacts
    path: str
    layout: Layout


class MappedShards:
    """Shards side by side in one stretch of addresses. They are mapped when they are needed, and trusted once they were summed."""

    def __init__(self, store: ShardStore, index: DatasetIndex, columns: Sequence[Column]) -> None:
        self._store, self._index, self._columns = store, index, columns
        sizes = [shard.size_bytes for shard in index.shards]
        period = period_of((column.item_bytes for column in columns if not column.varying), sizes)
        self.in_rows, self._period = period is not None, period or mmap.PAGESIZE
        """Whether items of every column begin at multiples of their size, in all shards."""
        ends = numpy.cumsum([(-(-size // self._period) + 1) * self._period for size in sizes])
        self.region = _region(int(ends[-1]), store.address)
        self.at = numpy.concatenate([[0], ends[:-1]])
        """Where each shard begins."""
        self.open: OrderedDict[int, Mapped] = OrderedDict()
        self.is_open = numpy.zeros(len(sizes), dtype=bool)
        # Where the first sample of the set would begin, if all lay in this shard: the byte, and the row.
        self.origins = {
            column.name: numpy.zeros(len(sizes), dtype=numpy.int64) for column in columns
        }
        self.first_rows = {
            column.name: numpy.zeros(len(sizes), dtype=numpy.int64) for column in columns
        }
        leaves = numpy.cumsum([0, *(shard.leaves for shard in index.shards)])
        heads = numpy.array([shard.head_bytes for shard in index.shards])
        self._first_leaf, self._first_data = leaves[:-1], self.at + heads
        self._summed = numpy.zeros(int(leaves[-1]), dtype=bool)
        self.to_sum = int(leaves[-1])
        """How many leaves were not summed yet."""

    def begin_anew(self) -> None:
        """Forget what is open and what was summed: another thread may have been half done when this process was forked."""
        self.open.clear()
        self.is_open[:] = self._summed[:] = False
        self.to_sum = len(self._summed)

    def need(self, shards: Places) -> None:
        """Open the shards that are not."""
        if len(self.open) == len(self.is_open) or self.is_open.take(shards, mode="clip").all():
            return
        for number in numpy.unique(shards).tolist():
            if not self.is_open[number]:
                self._close_old(self._index.shards[number].size_bytes, keep=shards)
                self._open_one(number)

    def _open_one(self, number: int) -> None:
        try:
            self._map(number)
        except DataError:
            if not isinstance(self._store, FetchingStore):
                raise
            self._store.drop(self._index.shards[number])  # it was right when it came
            self._map(number)

    def _map(self, number: int) -> None:
        facts = self._index.shards[number]
        path, descriptor = self._fetch(facts)
        try:
            if os.fstat(descriptor).st_size != facts.size_bytes:
                raise damaged(
                    str(path), f"{os.fstat(descriptor).st_size} bytes instead of {facts.size_bytes}"
                )
            self._put(int(self.at[number]), descriptor, facts)
            head = self.region.bytes[self.at[number] : self.at[number] + facts.head_bytes].data
            layout = read_head(head, facts, self._index.columns, str(path))
            self._align(number, descriptor, layout)
        finally:
            os.close(descriptor)
        self.open[number] = Mapped(facts, str(path), layout)
        for column in self._columns:
            begin = int(self.at[number]) + layout.begins[column.name]
            self.origins[column.name][number] = (
                begin - number * self._index.samples_per_shard * column.item_bytes
            )
            self.first_rows[column.name][number] = (
                begin // max(1, column.item_bytes) - number * self._index.samples_per_shard
            )
        self.is_open[number] = True

    def _align(self, number: int, descriptor: int, layout: Layout) -> None:
        """Move a shard that was mapped to where its columns are rows of one matrix with those of the others."""
        if not self.in_rows:
            return
        fixed = tuple(
            (layout.begins[c.name], c.item_bytes)
            for c in self._columns
            if not c.varying and c.item_bytes
        )
        shift = shift_of(fixed, self._period)
        if shift is None:
            self.in_rows = False
            return
        facts, slot = (
            self._index.shards[number],
            int(self.at[number]) // self._period * self._period,
        )
        if slot + shift != self.at[number]:
            self.region.take_out(int(self.at[number]), facts.size_bytes)
            self._put(slot + shift, descriptor, facts)
            self.at[number], self._first_data[number] = (
                slot + shift,
                slot + shift + facts.head_bytes,
            )

    def _put(self, at: int, descriptor: int, facts: ShardFacts) -> None:
        try:
            self.region.put(at, descriptor, facts.size_bytes)
        except OSError as error:
            raise DataError(
                f"cannot map {facts.name} of {self._store.address}: {error.strerror}",
                fix="raise `ulimit -v` or vm.max_map_count, or pack larger shards",
            ) from error

    def _fetch(self, facts: ShardFacts) -> tuple[Path, int]:
        """Return the path of a shard, and an open file of it."""
        for last_try in (False, False, True):
            path = self._store.fetch(facts)
            try:
                return path, open_plain(path)
            except OSError as error:
                if last_try or not isinstance(
                    self._store, FetchingStore
                ):  # another process may have needed its room
                    raise DataError(
                        f"cannot read {path}: {error.strerror}", fix="fetch or pack the set again"
                    ) from error
        raise AssertionError

    def _close_old(self, more_bytes: int, keep: Places) -> None:
        """Take out the shards that were opened first, where only so many may be here or be mapped."""
        if not self._store.capacity_bytes and len(self.open) < _MOST_OPEN:
            return
        kept = set(keep.tolist())
        held = sum(shard.facts.size_bytes for shard in self.open.values())
        for number in [number for number in self.open if number not in kept]:
            if (
                held + more_bytes <= (self._store.capacity_bytes or math.inf)
                and len(self.open) < _MOST_OPEN
            ):
                return
            held -= self.open[number].facts.size_bytes
            self._close_one(number)

    def _close_one(self, number: int) -> None:
        facts = self.open.pop(number).facts
        self.is_open[number] = False
        self.region.take_out(int(self.at[number]), facts.size_bytes)
        mine = self._summed[self._first_leaf[number] : self._first_leaf[number] + facts.leaves]
        self.to_sum += int(mine.sum())
        mine[:] = False

    def trust(self, begins: Places, size: int, shards: Places) -> None:
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
            if not right and isinstance(self._store, FetchingStore):
                self._store.drop(self._index.shards[shard])  # it was right when it came
                self._close_one(shard)
                self._open_one(
                    shard
                )  # at the same place, as it is the same file, and every byte was summed
                right = self._is_right(leaf, shard)
            if not right:
                where = (leaf - int(self._first_leaf[shard])) * LEAF_BYTES + self.open[
                    shard
                ].facts.head_bytes
                raise damaged(
                    self.open[shard].path,
                    f"its bytes from {where} on are not those that were written",
                )
            self._summed[leaf] = True
            self.to_sum -= 1

    def _is_right(self, leaf: int, shard: int) -> bool:
        """Return whether the bytes of a leaf have the sum that was written down."""
        number = leaf - int(self._first_leaf[shard])
        begin = int(self._first_data[shard]) + number * LEAF_BYTES
        end = min(begin + LEAF_BYTES, int(self.at[shard]) + self.open[shard].facts.size_bytes)
        found = xxhash.xxh3_64_intdigest(self.region.bytes[begin:end].data)
        return bool(found == self.open[shard].layout.sums[number])


def _region(size: int, where: str) -> Region:
    try:
        return Region(size)
    except OSError as error:
        raise DataError(
            f"{INDEX} in {where} speaks of {size:,} bytes, for which there is no address space ({error.strerror})",
            fix="raise `ulimit -v`, or pack the set again",
        ) from error
