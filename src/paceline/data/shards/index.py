"""The index of a dataset: index.json, written last, so that an unfinished one has none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from paceline.dtypes import WIDTHS
from paceline.errors import DataError

INDEX = "index.json"
OFFSETS = ".offsets"
"""Suffix of the tensor that holds where each sample of a column of varying length begins."""
CHECKSUMS = "__xxh3__"
"""The tensor of a shard that holds the checksums of its leaves."""
LEAF_BYTES = 1 << 18
"""Bytes of a shard that one checksum covers: the least to read before a sample can be trusted."""

_FORMAT, _VERSION = "paceline-shards", 1
LONGEST_INDEX = 1 << 28
"""The most bytes of an index: enough for millions of shards."""

_LARGEST_SHARD = 1 << 40
_LONGEST_HEADER = 1 << 27
_MOST = 1 << 60  # bytes or samples: more than any dataset has, and far from an overflow
_SHARD_NAME = re.compile(r"\d{5,9}\.safetensors")
_COLUMN_NAME = re.compile(r"(?!__)[^\x00-\x1f/\\]{1,200}")


@dataclass(frozen=True)
class Column:
    """A named value that every sample has."""

    name: str
    dtype: str
    """The element type, by its safetensors name."""
    shape: tuple[int, ...] = ()
    """The shape of one sample; () if the length varies."""
    varying: bool = False
    """Whether samples are one-dimensional and differ in length."""

    @property
    def item_bytes(self) -> int:
        """The bytes of one sample, or of one element if the length varies."""
        return WIDTHS[self.dtype] * (1 if self.varying else math.prod(self.shape))


@dataclass(frozen=True)
class ShardFacts:
    """The entry of one shard in the index."""

    name: str
    samples: int
    size_bytes: int
    head_bytes: int
    """Bytes before the samples: the safetensors header and the checksums."""
    head_xxh3: str
    xxh3: str

    @property
    def leaves(self) -> int:
        """The number of checksums that cover the samples."""
        return -(-(self.size_bytes - self.head_bytes) // LEAF_BYTES)


@dataclass(frozen=True)
class DatasetIndex:
    """The content of index.json."""

    columns: tuple[Column, ...]
    samples_per_shard: int
    """Samples of every shard except the last, which may have fewer."""
    shards: tuple[ShardFacts, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else the packer stored: class names, a tokenizer, the origin of the data."""

    @cached_property
    def samples(self) -> int:
        """The number of samples."""
        return sum(shard.samples for shard in self.shards)

    def to_json(self) -> bytes:
        """Return the text of index.json."""
        tree = {"format": _FORMAT, "version": _VERSION} | asdict(self)
        return json.dumps(tree | {"xxh3": _checksum(tree)}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes, where: str) -> DatasetIndex:
        """Read an index; its checksum and its consistency are verified."""
        try:
            index = _parse(_verified_tree(content))
            _check_columns(index.columns)
            _check_shards(index)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{where} is not a valid index: {error}", fix="pack or download the dataset again"
            ) from error
        return index


def _parse(tree: Mapping[str, Any]) -> DatasetIndex:
    columns = tuple(Column(**entry | {"shape": tuple(entry["shape"])}) for entry in tree["columns"])
    shards = tuple(ShardFacts(**entry) for entry in tree["shards"])
    return DatasetIndex(columns, tree["samples_per_shard"], shards, dict(tree["about"]))


def _checksum(tree: Mapping[str, Any]) -> str:
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _verified_tree(content: bytes) -> dict[str, Any]:
    """Return the values of an index whose checksum matches."""
    tree = json.loads(content)
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    if tree.get("version") != _VERSION:
        raise ValueError(f"version {tree.get('version')!r}; this Paceline reads {_VERSION}")
    checksum = tree.pop("xxh3")
    if checksum != _checksum(tree):
        raise ValueError("its checksum does not match its content")
    return tree


def _check_columns(columns: Sequence[Column]) -> None:
    names = [column.name for column in columns]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns {names}")
    for column in columns:
        _check_column(column)


def _check_column(column: Column) -> None:
    if not _COLUMN_NAME.fullmatch(column.name) or column.name.endswith(OFFSETS):
        raise ValueError(f"invalid column name {column.name!r}")
    known = column.dtype in WIDTHS and all(_is_count(length) for length in column.shape)
    if not known or column.item_bytes > _MOST:
        raise ValueError(f"column {column.name} of {column.dtype} {column.shape}")
    if type(column.varying) is not bool or (column.varying and column.shape):
        raise ValueError(f"column {column.name} with varying={column.varying!r}")


def _check_shards(index: DatasetIndex) -> None:
    per_shard = index.samples_per_shard
    if not _is_count(per_shard) or not per_shard:
        raise ValueError(f"{per_shard} samples per shard")
    for number, shard in enumerate(index.shards):
        _check_shard(number, shard)
        last = number == len(index.shards) - 1
        if not (1 <= shard.samples <= per_shard if last else shard.samples == per_shard):
            raise ValueError(f"{shard.samples} samples in shard {number}")
    if len({shard.name for shard in index.shards}) < len(index.shards) or not index.shards:
        raise ValueError(f"{len(index.shards)} shards, or two of one name")
    if index.samples > _MOST or sum(shard.size_bytes for shard in index.shards) > _MOST:
        raise ValueError(f"more than {_MOST:,} samples or bytes")


def _check_shard(number: int, shard: ShardFacts) -> None:
    counts = shard.samples, shard.size_bytes, shard.head_bytes
    if not all(_is_count(value) for value in counts) or shard.head_bytes > shard.size_bytes:
        raise ValueError(f"shard {number} with counts {counts}")
    longest_head = _LONGEST_HEADER + 8 * shard.leaves
    if shard.size_bytes > _LARGEST_SHARD or shard.head_bytes > longest_head:
        raise ValueError(
            f"shard {number} with a header of {shard.head_bytes} of {shard.size_bytes} bytes"
        )
    if not isinstance(shard.name, str) or not _SHARD_NAME.fullmatch(shard.name):
        raise ValueError(f"invalid shard name {shard.name!r}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST
