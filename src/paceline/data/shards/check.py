"""Verify a dataset against its index: every byte of every file, and every offset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy
import xxhash

from paceline.data.pack.plan import PLAN, SPOOL, checksum_of, plan_in
from paceline.data.shards.index import (
    INDEX,
    LEAF_BYTES,
    LONGEST_INDEX,
    OFFSETS,
    DatasetIndex,
    ShardFacts,
)
from paceline.data.shards.shard import Layout, read_head
from paceline.errors import DataError
from paceline.safe_open import read_bytes, reading, refuse_outside

_CHANGED = "its bytes have changed since it was written"
_LEFT_BY_PACK = " (left by an interrupted pack)"


class DatasetProblem(NamedTuple):
    """A file of a dataset, and what is wrong with it."""

    file: str
    what: str


@dataclass
class CheckReport:
    """The result of a check."""

    index: DatasetIndex | None = None
    problems: list[DatasetProblem] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    """Files in the folder that are not part of the dataset; they are harmless."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def open_index(folder: Path) -> DatasetIndex:
    """Read the index of a dataset; the error tells an unfinished dataset from a missing one."""
    path = folder / INDEX
    try:
        content = read_bytes(path, LONGEST_INDEX, links=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_index(folder) from error
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}",
            fix="check the permissions of the file, or download or pack the dataset again",
        ) from error
    return DatasetIndex.from_json(content, str(path))


def _no_index(folder: Path) -> DataError:
    if plan_in(folder):
        return DataError(
            f"{folder} is an unfinished dataset",
            fix="repeat the command that packs it: it resumes",
        )
    return DataError(
        f"{folder} is not a dataset: it has no {INDEX}",
        fix="check the path, or make a dataset with `paceline data pack`",
    )


def check_dataset(
    folder: Path, progress: Callable[[str, int, int], None] | None = None
) -> CheckReport:
    """Read all of a dataset and list every problem with its file."""
    report = CheckReport()
    try:
        report.index = index = open_index(folder)
    except DataError as error:
        report.problems.append(DatasetProblem(INDEX, error.problem))
        return report
    if index.to_json() != read_bytes(folder / INDEX, LONGEST_INDEX, links=True):
        report.problems.append(DatasetProblem(INDEX, _CHANGED))
    for number, facts in enumerate(index.shards, 1):
        for what in _shard_problems(folder / facts.name, facts, index):
            report.problems.append(DatasetProblem(facts.name, what))
        if progress:
            progress("checking shards", number, len(index.shards))
    report.problems += _extra_file_problems(folder, index)
    report.strays = _strays(folder, index)
    return report


def _shard_problems(path: Path, facts: ShardFacts, index: DatasetIndex) -> Iterator[str]:
    try:
        with reading(path, links=True) as file:
            size = path.stat().st_size
            if size != facts.size_bytes:
                yield f"{size:,} bytes instead of {facts.size_bytes:,}"
                return
            yield from _content_problems(file, facts, index)
    except FileNotFoundError:
        yield "is missing"
    except OSError as error:
        yield f"cannot be read: {error.strerror}"
    except DataError as error:
        yield error.problem


def _content_problems(file: IO[bytes], facts: ShardFacts, index: DatasetIndex) -> Iterator[str]:
    """Read a whole shard and verify its header, its leaves, its checksum and its offsets."""
    head = file.read(facts.head_bytes)
    checksum = xxhash.xxh3_64(head)
    try:
        layout = read_head(head, facts, index.columns, facts.name)
    except DataError as error:
        yield error.problem
        return
    for number in range(facts.leaves):
        leaf = file.read(LEAF_BYTES)
        checksum.update(leaf)
        if xxhash.xxh3_64_intdigest(leaf) != int(layout.checksums[number]):
            begin = facts.head_bytes + number * LEAF_BYTES
            yield f"bytes {begin:,} to {begin + len(leaf):,} have changed since it was written"
    if checksum.hexdigest() != facts.xxh3:
        yield "its checksum does not match the index"
    yield from _offset_problems(file, facts, index, layout)


def _offset_problems(
    file: IO[bytes], facts: ShardFacts, index: DatasetIndex, layout: Layout
) -> Iterator[str]:
    for column in index.columns:
        if column.varying:
            file.seek(layout.begins[column.name + OFFSETS])
            offsets = numpy.frombuffer(file.read(8 * (facts.samples + 1)), dtype="<i8")
            length = layout.lengths[column.name]
            if offsets[0] != 0 or offsets[-1] != length or (numpy.diff(offsets) < 0).any():
                yield f"the offsets of {column.name} do not increase from 0 to {length:,}"


def _extra_file_problems(folder: Path, index: DatasetIndex) -> Iterator[DatasetProblem]:
    for name, checksum in extra_files(index).items():
        try:
            refuse_outside(folder / name, folder)
            if checksum_of(folder / name) != checksum:
                yield DatasetProblem(name, _CHANGED)
        except FileNotFoundError:
            yield DatasetProblem(name, "is missing")
        except OSError as error:
            yield DatasetProblem(name, f"{error.strerror}")


def extra_files(index: DatasetIndex) -> dict[str, str]:
    """Return the files that belong to a dataset besides its shards, with their checksums."""
    files = index.about.get("files")
    if not isinstance(files, dict):
        return {}
    return {name: str(checksum) for name, checksum in files.items() if Path(name).name == name}


def _strays(folder: Path, index: DatasetIndex) -> list[str]:
    expected = {INDEX, *(shard.name for shard in index.shards), *extra_files(index)}
    notes = {PLAN: _LEFT_BY_PACK, SPOOL: _LEFT_BY_PACK}
    names = sorted(path.name for path in folder.iterdir())
    return [name + notes.get(name, "") for name in names if name not in expected]
