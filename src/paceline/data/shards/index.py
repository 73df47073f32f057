"""What a set of shards says of itself: index.json, written last, so that a set without one does not exist."""

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
"""What follows the name of a column of varying length, in the name of the tensor that says where each sample begins."""
SUMS = "__xxh3__"
"""The tensor of a shard that holds the sums of its leaves."""
LEAF_BYTES = 1 << 18
"""How much of a shard one sum covers: what must be read before one sample can be trusted."""

_FORMAT, _VERSION = "paceline-shards", 1
LONGEST_INDEX = 1 << 28
"""Bytes of an index: some millions of shards."""

_LARGEST_SHARD = 1 << 40
_LONGEST_HEADER = 1 << 27
_MOST = 1 << 60  # bytes or samples: far more than there will be, far less than overflows
_SHARD_NAME = re.compile(r"\d{5,9}\.safetensors")
_COLUMN_NAME = re.compile(r"(?!__)[^\x00-\x1f/\\]{1,200}")


@dataclass(frozen=True)
class Column:
    """One thing that every sample has."""

    name: str
    dtype: str
    """The type of an element, in the word of the safetensors format."""
    shape: tuple[int, ...] = ()
    """Of one sample; of no meaning where the length varies."""
    varying: bool = False
    """Whether samples are flat and of different lengths."""

    @property
    def item_bytes(self) -> int:
        """The bytes of one sample; of one element, if the length varies."""
        return WIDTHS[self.dtype] * (1 if self.varying else math.prod(self.shape))


@dataclass(frozen=True)
class ShardFacts:
    """One file of a set."""

    name: str
    samples: int
    size_bytes: int
    head_bytes: int
    """The header and the sums: all that comes before the samples."""
    head_xxh3: str
    xxh3: str

    @property
    def leaves(self) -> int:
        """How many sums cover the samples."""
        return -(-(self.size_bytes - self.head_bytes) // LEAF_BYTES)


@dataclass(frozen=True)
class DatasetIndex:
    """All that must be known before a sample is read."""

    columns: tuple[Column, ...]
    samples_per_shard: int
    """Of every shard but the last, which may have fewer."""
    shards: tuple[ShardFacts, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the packer knew besides: names of classes, a tokenizer, where it came from."""

    @cached_property
    def samples(self) -> int:
        """How many samples there are."""
        return sum(shard.samples for shard in self.shards)

    def to_json(self) -> bytes:
        """Return the text of index.json."""
        tree = {"format": _FORMAT, "version": _VERSION} | asdict(self)
        return json.dumps(tree | {"xxh3": _sum_of(tree)}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes, where: str) -> DatasetIndex:
        """Read an index; whatever is returned has been summed, and does not contradict itself."""
        try:
            tree = _summed_tree(content)
            index = cls(
                tuple(Column(**one | {"shape": tuple(one["shape"])}) for one in tree["columns"]),
                tree["samples_per_shard"],
                tuple(ShardFacts(**one) for one in tree["shards"]),
                dict(tree["about"]),
            )
            _check_columns(index.columns)
            _check_shards(index)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{where} is not a whole index ({error})", fix="pack or fetch the set again"
            ) from error
        return index


def _sum_of(tree: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(
        json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    )


def _summed_tree(content: bytes) -> dict[str, Any]:
    """Return the values of an index, if its sum is right."""
    tree = json.loads(content)
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise ValueError("it does not speak of shards")
    if tree.get("version") != _VERSION:
        raise ValueError(f"version {tree.get('version')!r}; this Paceline reads {_VERSION}")
    total = tree.pop("xxh3")
    if total != _sum_of(tree):
        raise ValueError("its sum is not that of its content")
    return tree


def _check_columns(columns: Sequence[Column]) -> None:
    names = [column.name for column in columns]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns {names}")
    for column in columns:
        if not _COLUMN_NAME.fullmatch(column.name) or column.name.endswith(OFFSETS):
            raise ValueError(f"a column named {column.name!r}")
        if (
            column.dtype not in WIDTHS
            or not all(_count(length) for length in column.shape)
            or column.item_bytes > _MOST
        ):
            raise ValueError(f"{column.name} of {column.dtype} {column.shape}")
        if type(column.varying) is not bool or (column.varying and column.shape):
            raise ValueError(f"{column.name} varying {column.varying!r}")


def _check_shards(index: DatasetIndex) -> None:
    each = index.samples_per_shard
    if not _count(each) or not each:
        raise ValueError(f"{each} samples per shard")
    for number, shard in enumerate(index.shards):
        numbers = shard.samples, shard.size_bytes, shard.head_bytes
        if not all(_count(value) for value in numbers) or shard.head_bytes > shard.size_bytes:
            raise ValueError(f"shard {number} with counts {numbers}")
        if (
            shard.size_bytes > _LARGEST_SHARD
            or shard.head_bytes > _LONGEST_HEADER + 8 * shard.leaves
        ):
            raise ValueError(
                f"shard {number} with a head of {shard.head_bytes} of {shard.size_bytes} bytes"
            )
        if not isinstance(shard.name, str) or not _SHARD_NAME.fullmatch(shard.name):
            raise ValueError(f"a shard named {shard.name!r}")
        last = number == len(index.shards) - 1
        if not (1 <= shard.samples <= each if last else shard.samples == each):
            raise ValueError(f"{shard.samples} samples in shard {number}")
    if len({shard.name for shard in index.shards}) < len(index.shards) or not index.shards:
        raise ValueError(f"{len(index.shards)} shards")
    if index.samples > _MOST or sum(shard.size_bytes for shard in index.shards) > _MOST:
        raise ValueError("more samples than there can be")


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST
