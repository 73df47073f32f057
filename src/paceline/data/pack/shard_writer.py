"""Split an input into shards, and write one shard."""

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

_FIRST = 64  # samples from which the size of a sample is estimated


@dataclass(frozen=True)
class ShardJob:
    """All shards of a dataset; the number of a shard determines its samples."""

    given: Input
    folder: str
    columns: tuple[Column, ...]
    samples_per_shard: int

    @property
    def count(self) -> int:
        """The number of shards."""
        return -(-self.given.samples // self.samples_per_shard)

    def run(self, number: int) -> dict[str, Any]:
        """Write one shard; return its facts."""
        begin = number * self.samples_per_shard
        rows = self.given.read(begin, min(begin + self.samples_per_shard, self.given.samples))
        return asdict(write_rows(Path(self.folder), number, self.columns, rows))

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        nested = {"given": tree_of(self.given), "columns": list(map(asdict, self.columns))}
        return {"job": "shards"} | vars(self) | nested

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> ShardJob:
        """Rebuild the object from the dict of `tree`."""
        columns = tuple(
            Column(**fields | {"shape": tuple(fields["shape"])}) for fields in tree["columns"]
        )
        return cls(**tree | {"given": input_from(tree["given"]), "columns": columns})


def shard_name(number: int) -> str:
    """Return the file name of a shard.

    >>> shard_name(7)
    '00007.safetensors'
    """
    return f"{number:05d}.safetensors"


def write_rows(folder: Path, number: int, columns: tuple[Column, ...], rows: Rows) -> ShardFacts:
    """Write samples as a shard; raise if their columns differ from those of the dataset."""
    for expected, actual in zip(columns, columns_of(rows), strict=True):
        if actual != expected:
            raise DataError(
                f"column {actual.name} is {describe_column(expected)} in the first samples, "
                f"but {describe_column(actual)} in shard {number}",
                fix="give all samples the same types and shapes",
            )
    return write_shard(folder, shard_name(number), columns, rows)


def describe_column(column: Column) -> str:
    """Return type and shape of a column for messages.

    >>> describe_column(Column("image", "U8", (28, 28)))
    'U8 [28, 28]'
    >>> describe_column(Column("text", "U8", (), True))
    'U8 of varying length'
    >>> describe_column(Column("label", "I64"))
    'I64'
    """
    if column.varying:
        return f"{column.dtype} of varying length"
    return f"{column.dtype} {list(column.shape)}" if column.shape else column.dtype


def plan_shards(given: Input, folder: Path, shard_bytes: int) -> ShardJob:
    """Choose the number of samples per shard from the size of the first samples."""
    first = bytes_each(given.read(0, 1))
    count = min(given.samples, _FIRST, max(1, int(shard_bytes // max(1, first))))
    rows = given.read(0, count)
    return ShardJob(given, str(folder), columns_of(rows), samples_in(shard_bytes, rows))


def samples_in(shard_bytes: int, rows: Rows) -> int:
    """Return the number of samples per shard, judged by these."""
    return max(1, int(shard_bytes // max(1, bytes_each(rows))))


def bytes_each(rows: Rows) -> float:
    """Return the mean bytes per sample."""
    total = 0
    for values in rows.values():
        if isinstance(values, Varying):
            total += values.flat.nbytes + values.offsets.nbytes
        else:
            total += values.nbytes
    return total / count_of(next(iter(rows.values())))
