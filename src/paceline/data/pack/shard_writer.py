"""How an input is cut into shards, and how one of them is written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.data.pack.columns import columns_of
from paceline.data.pack.input_kinds import input_from, tree_of
from paceline.data.pack.inputs import Input
from paceline.data.shards.index import Column, ShardFacts
from paceline.data.shards.shard import Rows, Varying, count_of, write_shard
from paceline.errors import DataError

_TRIED = 64


@dataclass(frozen=True)
class ShardJob:
    """Every shard of a set: which samples it has depends on its number alone."""

    given: Input
    folder: str
    columns: tuple[Column, ...]
    samples_per_shard: int

    @property
    def count(self) -> int:
        """How many shards there are."""
        return -(-self.given.samples // self.samples_per_shard)

    def run(self, number: int) -> dict[str, Any]:
        """Write a shard; return its facts."""
        begin = number * self.samples_per_shard
        rows = self.given.read(begin, min(begin + self.samples_per_shard, self.given.samples))
        return asdict(write_rows(Path(self.folder), number, self.columns, rows))

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""
        return (
            {"job": "shards"}
            | vars(self)
            | {"given": tree_of(self.given), "columns": list(map(asdict, self.columns))}
        )

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> ShardJob:
        """Return what `tree` said."""
        columns = tuple(Column(**one | {"shape": tuple(one["shape"])}) for one in tree["columns"])
        return cls(**tree | {"given": input_from(tree["given"]), "columns": columns})


def shard_name(number: int) -> str:
    """Return the file name of a shard.

    >>> shard_name(7)
    '00007.safetensors'
    """
    return f"{number:05d}.safetensors"


def write_rows(folder: Path, number: int, columns: tuple[Column, ...], rows: Rows) -> ShardFacts:
    """Write some samples as a shard, if they have the columns of the set."""
    for expected, found in zip(columns, columns_of(rows), strict=True):
        if found != expected:
            raise DataError(
                f"column {found.name} is {describe_column(expected)} in the first samples, and {describe_column(found)} in shard {number}",
                fix="make all samples alike",
            )
    return write_shard(folder, shard_name(number), columns, rows)


def describe_column(column: Column) -> str:
    """Return what a column holds, in words.

    >>> describe_column(Column("image", "U8", (28, 28))), describe_column(Column("text", "U8", (), True)), describe_column(Column("label", "I64"))
    ('U8 [28, 28]', 'U8 of varying length', 'I64')
    """
    shape = (
        " of varying length" if column.varying else f" {list(column.shape)}" if column.shape else ""
    )
    return f"{column.dtype}{shape}"


def plan_shards(given: Input, folder: Path, shard_bytes: int) -> ShardJob:
    """Choose how many samples a shard has, by the first ones, so that it has about as many bytes as are wanted."""
    first = bytes_each(given.read(0, 1))
    tried = min(given.samples, _TRIED, max(1, int(shard_bytes // max(1, first))))
    rows = given.read(0, tried)
    return ShardJob(given, str(folder), columns_of(rows), samples_in(shard_bytes, rows))


def samples_in(shard_bytes: int, rows: Rows) -> int:
    """Return how many samples like these make a shard."""
    return max(1, int(shard_bytes // max(1, bytes_each(rows))))


def bytes_each(rows: Rows) -> float:
    """Return the bytes of one sample, on average."""
    total = 0
    for values in rows.values():
        total += (
            values.flat.nbytes + values.offsets.nbytes
            if isinstance(values, Varying)
            else values.nbytes
        )
    return total / count_of(next(iter(rows.values())))
