"""The format of a shard: a safetensors file with a tensor per column, and checksums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import xxhash
from numpy.typing import NDArray

from paceline.data.shards.index import CHECKSUMS, LEAF_BYTES, OFFSETS, Column, ShardFacts
from paceline.dtypes import SAFETENSORS_NAMES, WIDTHS
from paceline.errors import DataError
from paceline.rundir import write_whole, writing_to
from paceline.tensorfile import Spec, TensorSpan, plan_in_order, read_places

Array = NDArray[numpy.generic]

_ALIGN = 4096
"""Samples begin at a multiple of this, so that every column, the widest first, is aligned."""


class Varying(NamedTuple):
    """Samples of different lengths."""

    flat: Array
    """All samples, concatenated."""
    offsets: NDArray[numpy.int64]
    """Where each sample begins, and where the last ends."""


Rows = Mapping[str, Array | Varying]
"""Samples: for every column, an array whose first axis counts them."""


class Layout(NamedTuple):
    """Where the tensors of a shard are, from its header."""

    begins: dict[str, int]
    """The first byte of every tensor."""
    lengths: dict[str, int]
    """The length of every tensor along its first axis."""
    checksums: NDArray[numpy.uint64]
    """The checksum of every leaf."""


def column_of(name: str, values: Array | Varying) -> Column:
    """Return the column that describes these values."""
    varying = isinstance(values, Varying)
    array = values.flat if isinstance(values, Varying) else values
    dtype = SAFETENSORS_NAMES.get(array.dtype.name)
    if dtype is None:
        raise DataError(
            f"column {name} has the type {array.dtype}, which shards do not support",
            fix="convert it to numbers of a fixed width",
        )
    return Column(name, dtype, () if varying else array.shape[1:], varying)


def write_shard(folder: Path, name: str, columns: Sequence[Column], rows: Rows) -> ShardFacts:
    """Write one shard atomically; return its entry for the index."""
    content, head = shard_bytes(columns, rows)
    with writing_to(folder, "name another folder with --to"):
        write_whole(folder / name, content)
    samples = count_of(rows[columns[0].name])
    head_checksum = xxhash.xxh3_64_hexdigest(content[:head])
    checksum = xxhash.xxh3_64_hexdigest(content)
    return ShardFacts(name, samples, len(content), head, head_checksum, checksum)


def count_of(values: Array | Varying) -> int:
    """Return the number of samples in these values."""
    return len(values.offsets) - 1 if isinstance(values, Varying) else len(values)


def shard_bytes(columns: Sequence[Column], rows: Rows) -> tuple[memoryview, int]:
    """Return the content of a shard, and the length of its head: header and checksums."""
    tensors = _tensors(columns, rows)
    leaves = -(-sum(value.nbytes for value in tensors.values()) // LEAF_BYTES)
    specs = [
        Spec(name, SAFETENSORS_NAMES[value.dtype.name], value.shape)
        for name, value in tensors.items()
    ]
    specs.sort(key=_alignment, reverse=True)
    checksum_spec = Spec(CHECKSUMS, "U64", (leaves,))
    image = plan_in_order([checksum_spec, *specs], None, aligned=1, align=_ALIGN)
    content = memoryview(bytearray(image.size_bytes))
    content[: len(image.header)] = image.header
    for place in image.places:
        if place.spec.name != CHECKSUMS and place.end > place.begin:
            data = tensors[place.spec.name].reshape(-1).view(numpy.uint8).data
            content[place.begin : place.end] = data
    head = next(place for place in image.places if place.spec.name == CHECKSUMS)
    checksums = [xxhash.xxh3_64_intdigest(leaf) for leaf in _leaves(content[head.end :])]
    content[head.begin : head.end] = numpy.array(checksums, dtype="<u8").tobytes()
    return content, head.end


def _alignment(spec: Spec) -> int:
    """Return the largest power of two that divides the size of an item."""
    size = WIDTHS[spec.dtype] * math.prod(spec.shape[1:])
    return size & -size


def _leaves(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), LEAF_BYTES):
        yield data[begin : begin + LEAF_BYTES]


def read_head(
    start: bytes | memoryview, facts: ShardFacts, columns: Sequence[Column], where: str
) -> Layout:
    """Return the layout of a shard from its head, verified against the index."""
    if len(start) != facts.head_bytes or xxhash.xxh3_64_hexdigest(start) != facts.head_xxh3:
        raise damaged(where, "its header does not match the index")
    try:
        places = {place.spec.name: place for place in read_places(start, facts.size_bytes)}
        _check(places, facts, columns)
    except (ValueError, KeyError) as error:
        raise damaged(where, f"its header belongs to another dataset: {error}") from error
    raw = start[places[CHECKSUMS].begin : places[CHECKSUMS].end]
    begins = {name: place.begin for name, place in places.items()}
    lengths = {name: place.spec.shape[0] for name, place in places.items()}
    return Layout(begins, lengths, numpy.frombuffer(raw, dtype="<u8").copy())


def damaged(where: str, why: str) -> DataError:
    """Return the error for a shard with wrong content."""
    return DataError(
        f"{where} is damaged: {why}",
        fix="download it again, or pack the dataset again; `paceline data check` lists all damaged files",
    )


def _tensors(columns: Sequence[Column], rows: Rows) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for column in columns:
        values = rows[column.name]
        if isinstance(values, Varying):
            tensors[column.name + OFFSETS] = numpy.ascontiguousarray(values.offsets, dtype="<i8")
            values = values.flat
        tensors[column.name] = numpy.ascontiguousarray(values)
    return tensors


def _check(places: Mapping[str, TensorSpan], facts: ShardFacts, columns: Sequence[Column]) -> None:
    """Check that a header has the columns of the dataset and no others."""
    expected: dict[str, tuple[str, tuple[int, ...]]] = {CHECKSUMS: ("U64", (facts.leaves,))}
    for column in columns:
        if column.varying:
            expected[column.name + OFFSETS] = "I64", (facts.samples + 1,)
            expected[column.name] = column.dtype, places[column.name].spec.shape
        else:
            expected[column.name] = column.dtype, (facts.samples, *column.shape)
    actual = {name: (place.spec.dtype, place.spec.shape) for name, place in places.items()}
    if actual != expected or places[CHECKSUMS].end != facts.head_bytes:
        raise ValueError(f"it holds {actual}")
    for name, place in places.items():
        if name != CHECKSUMS and place.begin < min(place.end, facts.head_bytes):
            raise ValueError("samples lie before the checksums")
    if any(column.varying and len(places[column.name].spec.shape) != 1 for column in columns):
        raise ValueError("a column of varying length is not one-dimensional")
