"""Memory-mapped shards: where each lies, and which of its bytes were verified."""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy
import xxhash
from numpy.typing import NDArray

from paceline.data.order import Places
from paceline.data.shards.address_space import Region, period_of, shift_of
from paceline.data.shards.index import INDEX, LEAF_BYTES, Column, DatasetIndex, ShardFacts
from paceline.data.shards.shard import Layout, damaged, read_head
from paceline.data.shards.store import FetchingStore, ShardStore
from paceline.errors import DataError
from paceline.safe_open import open_plain

_MOST_OPEN = 1 << 14  # each takes two of the 65,530 mappings that Linux gives a process


@dataclass(frozen=True)
class MappedShard:
    """A shard that is mapped."""

    facts: ShardFacts
    path: str
    layout: Layout


class Origins(NamedTuple):
    """For every shard: where sample 0 would begin if all samples lay in it."""

    bytes: NDArray[numpy.int64]
    rows: NDArray[numpy.int64]


class _LeafFlags:
    """Which leaves were verified. The leaves of all shards are numbered consecutively."""

    def __init__(self, shards: Sequence[ShardFacts]) -> None:
        ends = numpy.cumsum([0, *(shard.leaves for shard in shards)])
        self.first = ends[:-1]
        """The first leaf of each shard."""
        self.verified = numpy.zeros(int(ends[-1]), dtype=bool)
        self.left = len(self.verified)
        """The number of leaves that were not verified."""

    def clear(self) -> None:
        self.verified[:] = False
        self.left = len(self.verified)

    def clear_shard(self, number: int, leaves: int) -> None:
        first = self.first[number]
        flags = self.verified[first : first + leaves]
        self.left += int(flags.sum())
        flags[:] = False

    def set(self, leaf: int) -> None:
        self.verified[leaf] = True
        self.left -= 1


class MappedShards:
    """Shards side by side in one range of addresses.

    They are mapped and verified when they are needed.
    """

    def __init__(self, store: ShardStore, index: DatasetIndex, columns: Sequence[Column]) -> None:
        self._store, self._index, self._columns = store, index, columns
        sizes = [shard.size_bytes for shard in index.shards]
        period = period_of((column.item_bytes for column in columns if not column.varying), sizes)
        self.in_rows, self._period = period is not None, period or mmap.PAGESIZE
        """Whether items of every column begin at multiples of their size, in all shards."""
        ends = numpy.cumsum([(-(-size // self._period) + 1) * self._period for size in sizes])
        self.region = _reserve(int(ends[-1]), store.address)
        self.at = numpy.concatenate([[0], ends[:-1]])
        """Where each shard begins."""
        self.open: OrderedDict[int, MappedShard] = OrderedDict()
        self.is_open = numpy.zeros(len(sizes), dtype=bool)
        self.origins = {column.name: _new_origins(len(sizes)) for column in columns}
        self._first_data = self.at + numpy.array([shard.head_bytes for shard in index.shards])
        self._leaves = _LeafFlags(index.shards)

    @property
    def _fetching(self) -> FetchingStore | None:
        return self._store if isinstance(self._store, FetchingStore) else None

    @property
    def unverified(self) -> int:
        """The number of leaves that were not verified yet."""
        return self._leaves.left

    def reset(self) -> None:
        """Forget the mapped shards: a fork may have interrupted another thread half way."""
        self.open.clear()
        self.is_open[:] = False
        self._leaves.clear()

    def need(self, shards: Places) -> None:
        """Map the shards that are not mapped."""
        if len(self.open) == len(self.is_open) or self.is_open.take(shards, mode="clip").all():
            return
        for number in numpy.unique(shards).tolist():
            if not self.is_open[number]:
                self._close_oldest(self._index.shards[number].size_bytes, keep=shards)
                self._open(number)

    def _open(self, number: int) -> None:
        try:
            self._map(number)
        except DataError:
            if self._fetching is None:
                raise
            # It was intact when it was downloaded: the cache was damaged since.
            self._fetching.drop(self._index.shards[number])
            self._map(number)

    def _map(self, number: int) -> None:
        facts = self._index.shards[number]
        path, descriptor = self._fetch(facts)
        try:
            size = os.fstat(descriptor).st_size
            if size != facts.size_bytes:
                raise damaged(str(path), f"{size} bytes instead of {facts.size_bytes}")
            self._put(int(self.at[number]), descriptor, facts)
            head = self.region.bytes[self.at[number] : self.at[number] + facts.head_bytes].data
            layout = read_head(head, facts, self._index.columns, str(path))
            self._align(number, descriptor, layout)
        finally:
            os.close(descriptor)
        self.open[number] = MappedShard(facts, str(path), layout)
        before = number * self._index.samples_per_shard
        for column in self._columns:
            begin, size = int(self.at[number]) + layout.begins[column.name], column.item_bytes
            origins = self.origins[column.name]
            origins.bytes[number] = begin - before * size
            origins.rows[number] = begin // max(1, size) - before
        self.is_open[number] = True

    def _align(self, number: int, descriptor: int, layout: Layout) -> None:
        """Move a mapped shard so that its columns are rows of the common matrices."""
        if not self.in_rows:
            return
        fixed = tuple(
            (layout.begins[column.name], column.item_bytes)
            for column in self._columns
            if not column.varying and column.item_bytes
        )
        shift = shift_of(fixed, self._period)
        if shift is None:
            self.in_rows = False
            return
        facts, old = self._index.shards[number], int(self.at[number])
        new = old // self._period * self._period + shift
        if new != old:
            self.region.take_out(old, facts.size_bytes)
            self._put(new, descriptor, facts)
            self.at[number], self._first_data[number] = new, new + facts.head_bytes

    def _put(self, at: int, descriptor: int, facts: ShardFacts) -> None:
        try:
            self.region.put(at, descriptor, facts.size_bytes)
        except OSError as error:
            raise DataError(
                f"cannot map {facts.name} of {self._store.address}: {error.strerror}",
                fix="raise `ulimit -v` or vm.max_map_count, or pack larger shards",
            ) from error

    def _fetch(self, facts: ShardFacts) -> tuple[Path, int]:
        """Return the path of a shard, and its open file."""
        for last_try in (False, False, True):
            path = self._store.fetch(facts)
            try:
                return path, open_plain(path, links=True)
            except OSError as error:
                # Another process may have evicted the shard from the cache: fetch it again.
                if last_try or self._fetching is None:
                    raise DataError(
                        f"cannot read {path}: {error.strerror}",
                        fix="download or pack the dataset again",
                    ) from error
        raise AssertionError

    def _close_oldest(self, more_bytes: int, keep: Places) -> None:
        """Unmap the shards that were mapped first until `more_bytes` fit within the limits."""
        if not self._store.capacity_bytes and len(self.open) < _MOST_OPEN:
            return
        limit = self._store.capacity_bytes or math.inf
        kept = set(keep.tolist())
        held = sum(shard.facts.size_bytes for shard in self.open.values())
        for number in [number for number in self.open if number not in kept]:
            if held + more_bytes <= limit and len(self.open) < _MOST_OPEN:
                return
            held -= self.open[number].facts.size_bytes
            self._close(number)

    def _close(self, number: int) -> None:
        facts = self.open.pop(number).facts
        self.is_open[number] = False
        self.region.take_out(int(self.at[number]), facts.size_bytes)
        self._leaves.clear_shard(number, facts.leaves)

    def verify(self, begins: Places, size: int, shards: Places) -> None:
        """Verify the checksums of bytes to be read, if not done before."""
        offsets, first = begins - self._first_data[shards], self._leaves.first[shards]
        verified = self._leaves.verified
        for distance in [*range(0, size, LEAF_BYTES), size - 1]:
            leaves = first + (offsets + distance) // LEAF_BYTES
            if not verified[leaves].all():
                self._verify_leaves(numpy.unique(leaves[~verified[leaves]]))

    def _verify_leaves(self, leaves: NDArray[numpy.int64]) -> None:
        shards = numpy.searchsorted(self._leaves.first, leaves, side="right") - 1
        for leaf, shard in zip(leaves.tolist(), shards.tolist(), strict=True):
            intact = self._is_intact(leaf, shard)
            if not intact and self._fetching is not None:
                # It was intact when downloaded. The new file gets the same addresses.
                self._fetching.drop(self._index.shards[shard])
                self._close(shard)
                self._open(shard)
                intact = self._is_intact(leaf, shard)
            if not intact:
                raise self._changed(leaf, shard)
            self._leaves.set(leaf)

    def _is_intact(self, leaf: int, shard: int) -> bool:
        number = leaf - int(self._leaves.first[shard])
        begin = int(self._first_data[shard]) + number * LEAF_BYTES
        end = min(begin + LEAF_BYTES, int(self.at[shard]) + self.open[shard].facts.size_bytes)
        checksum = xxhash.xxh3_64_intdigest(self.region.bytes[begin:end].data)
        return bool(checksum == self.open[shard].layout.checksums[number])

    def _changed(self, leaf: int, shard: int) -> DataError:
        offset = (leaf - int(self._leaves.first[shard])) * LEAF_BYTES
        begin = offset + self.open[shard].facts.head_bytes
        why = f"the bytes from {begin} on have changed since it was written"
        return damaged(self.open[shard].path, why)


def _new_origins(shards: int) -> Origins:
    return Origins(numpy.zeros(shards, dtype=numpy.int64), numpy.zeros(shards, dtype=numpy.int64))


def _reserve(size: int, where: str) -> Region:
    try:
        return Region(size)
    except OSError as error:
        raise DataError(
            f"{INDEX} in {where} lists {size:,} bytes, too many for the address space ({error.strerror})",
            fix="raise `ulimit -v`, or pack the dataset again",
        ) from error
