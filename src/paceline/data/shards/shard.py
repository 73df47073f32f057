"""How samples lie in one shard: a safetensors file with a tensor for every column, and sums that cover every byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import xxhash
from numpy.typing import NDArray

from paceline.data.shards.index import LEAF_BYTES, OFFSETS, SUMS, Column, ShardFacts
from paceline.dtypes import SAFETENSORS_NAMES, WIDTHS
from paceline.errors import DataError
from paceline.rundir import write_whole, writing_to
from paceline.tensorfile import Spec, TensorSpan, plan_in_order, read_places

Array = NDArray[numpy.generic]

_ALIGN = 4096  # samples begin at a multiple of this: with the order of the columns, so do those of any power of two below


class Varying(NamedTuple):
    """Samples of different lengths."""

    flat: Array
    """All of them, one after the other."""
    offsets: NDArray[numpy.int64]
    """Where each begins, and where the last ends."""


Rows = Mapping[str, Array | Varying]
"""Some samples: for every column, an array whose first axis counts them."""


class Layout(NamedTuple):
    """Where things are in a shard whose head was read."""

    begins: dict[str, int]
    """The first byte of every tensor."""
    lengths: dict[str, int]
    """How many elements every tensor has along its first axis."""
    sums: NDArray[numpy.uint64]


def column_of(name: str, values: Array | Varying) -> Column:
    """Return the column that such values make."""
    array = values.flat if isinstance(values, Varying) else values
    word = SAFETENSORS_NAMES.get(array.dtype.name)
    if word is None:
        raise DataError(
            f"column {name} is of type {array.dtype}, which a shard cannot hold",
            fix="make it numbers of a fixed width",
        )
    varying = isinstance(values, Varying)
    return Column(name, word, () if varying else array.shape[1:], varying)


def write_shard(folder: Path, name: str, columns: Sequence[Column], rows: Rows) -> ShardFacts:
    """Write one shard, all at once; return what the index says of it."""
    content, head = shard_bytes(columns, rows)
    with writing_to(folder, "name another folder with --to"):
        write_whole(folder / name, content)
    sums = xxhash.xxh3_64_hexdigest(content[:head]), xxhash.xxh3_64_hexdigest(content)
    return ShardFacts(name, count_of(rows[columns[0].name]), len(content), head, *sums)


def count_of(values: Array | Varying) -> int:
    """Return how many samples some values are of."""
    return len(values.offsets) - 1 if isinstance(values, Varying) else len(values)


def shard_bytes(columns: Sequence[Column], rows: Rows) -> tuple[memoryview, int]:
    """Return the whole file of some samples, and the length of its head."""
    tensors = _tensors(columns, rows)
    leaves = -(-sum(value.nbytes for value in tensors.values()) // LEAF_BYTES)
    specs = [
        Spec(name, SAFETENSORS_NAMES[value.dtype.name], value.shape)
        for name, value in tensors.items()
    ]
    ordered = sorted(specs, key=_alignment, reverse=True)
    image = plan_in_order([Spec(SUMS, "U64", (leaves,)), *ordered], None, aligned=1, align=_ALIGN)
    content = memoryview(bytearray(image.size_bytes))
    content[: len(image.header)] = image.header
    for place in image.places:
        if place.spec.name != SUMS and place.end > place.begin:
            content[place.begin : place.end] = (
                tensors[place.spec.name].reshape(-1).view(numpy.uint8).data
            )
    sums = next(place for place in image.places if place.spec.name == SUMS)
    found = [xxhash.xxh3_64_intdigest(leaf) for leaf in _leaves(content[sums.end :])]
    content[sums.begin : sums.end] = numpy.array(found, dtype="<u8").tobytes()
    return content, sums.end


def _alignment(spec: Spec) -> int:
    """Return the largest power of two of which all items of a column begin at multiples, if the first does."""
    size = WIDTHS[spec.dtype] * math.prod(spec.shape[1:])
    return size & -size


def _leaves(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), LEAF_BYTES):
        yield data[begin : begin + LEAF_BYTES]


def read_head(
    start: bytes | memoryview, facts: ShardFacts, columns: Sequence[Column], where: str
) -> Layout:
    """Return where things are, from the head of a shard; whatever is returned is what the index speaks of."""
    if len(start) != facts.head_bytes or xxhash.xxh3_64_hexdigest(start) != facts.head_xxh3:
        raise damaged(where, "its head is not what the index says")
    try:
        places = {place.spec.name: place for place in read_places(start, facts.size_bytes)}
        _check(places, facts, columns)
    except (ValueError, KeyError) as error:
        raise damaged(where, f"its head is of another set: {error}") from error
    sums = numpy.frombuffer(start[places[SUMS].begin : places[SUMS].end], dtype="<u8").copy()
    begins = {name: place.begin for name, place in places.items()}
    return Layout(begins, {name: place.spec.shape[0] for name, place in places.items()}, sums)


def damaged(where: str, why: str) -> DataError:
    """Return the error of a shard that cannot be trusted."""
    return DataError(
        f"{where} is damaged: {why}",
        fix="fetch it again, or pack the set again; `paceline data check` finds all such",
    )


def _tensors(columns: Sequence[Column], rows: Rows) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for column in columns:
        values = rows[column.name]
        if isinstance(values, Varying):
            found[column.name + OFFSETS] = numpy.ascontiguousarray(values.offsets, dtype="<i8")
            values = values.flat
        found[column.name] = numpy.ascontiguousarray(values)
    return found


def _check(places: Mapping[str, TensorSpan], facts: ShardFacts, columns: Sequence[Column]) -> None:
    """See that a head has the columns of the set, and no others."""
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {SUMS: ("U64", (facts.leaves,))}
    for column in columns:
        if column.varying:
            wanted[column.name + OFFSETS] = "I64", (facts.samples + 1,)
            wanted[column.name] = column.dtype, places[column.name].spec.shape
        else:
            wanted[column.name] = column.dtype, (facts.samples, *column.shape)
    found = {name: (place.spec.dtype, place.spec.shape) for name, place in places.items()}
    if found != wanted or places[SUMS].end != facts.head_bytes:
        raise ValueError(f"it holds {found}")
    if any(
        place.begin < min(place.end, facts.head_bytes)
        for name, place in places.items()
        if name != SUMS
    ):
        raise ValueError("samples that lie before the sums")
    if any(column.varying and len(places[column.name].spec.shape) != 1 for column in columns):
        raise ValueError("a column of varying length that is not flat")
