"""Whether a set is what its index says: every byte of every file, and every offset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy
import xxhash

from paceline.data.pack.plan import PLAN, SPOOL, checksum_of, plan_in
from paceline.data.safe_open import open_plain, read_bounded
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


class DatasetProblem(NamedTuple):
    """Something that is not as it should be."""

    file: str
    what: str


@dataclass
class CheckReport:
    """What was found in a folder."""

    index: DatasetIndex | None = None
    problems: list[DatasetProblem] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    """Files that are no part of the set; they do no harm."""

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return not self.problems


def open_index(folder: Path) -> DatasetIndex:
    """Read the index of a set; of one that was not finished, say so."""
    path = folder / INDEX
    try:
        content = read_bounded(path, LONGEST_INDEX)
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise DataError(
                f"cannot read {path}: {error.strerror}", fix="check who may read it"
            ) from error
        if plan_in(folder):
            problem, fix = (
                "holds a set that is not finished",
                "repeat the command that packs it: it goes on",
            )
        else:
            problem, fix = (
                f"holds no set (there is no {INDEX})",
                "name another folder, or make one: `paceline data pack`",
            )
        raise DataError(f"{folder} {problem}", fix=fix) from error
    return DatasetIndex.from_json(content, str(path))


def check_dataset(
    folder: Path, progress: Callable[[str, int, int], None] | None = None
) -> CheckReport:
    """Read all of a set; what is wrong is told with its file, all of it."""
    verdict = CheckReport()
    try:
        verdict.index = index = open_index(folder)
    except DataError as error:
        verdict.problems.append(DatasetProblem(INDEX, error.problem))
        return verdict
    if index.to_json() != read_bounded(folder / INDEX, LONGEST_INDEX):
        verdict.problems.append(DatasetProblem(INDEX, "its bytes are not those that were written"))
    for number, facts in enumerate(index.shards, 1):
        verdict.problems += [
            DatasetProblem(facts.name, what) for what in _shard(folder / facts.name, facts, index)
        ]
        if progress:
            progress("checking shards", number, len(index.shards))
    verdict.problems += _beside(folder, index)
    verdict.strays = _strays(folder, index)
    return verdict


def _shard(path: Path, facts: ShardFacts, index: DatasetIndex) -> Iterator[str]:
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            size = path.stat().st_size
            if size != facts.size_bytes:
                yield f"{size:,} bytes instead of {facts.size_bytes:,}"
                return
            yield from _content(file, facts, index)
    except FileNotFoundError:
        yield "is missing"
    except OSError as error:
        yield f"cannot be read: {error.strerror}"
    except DataError as error:
        yield error.problem


def _content(file: IO[bytes], facts: ShardFacts, index: DatasetIndex) -> Iterator[str]:
    """Read a shard to its end, and say what is wrong with its head, its leaves, its offsets and its sum."""
    head = file.read(facts.head_bytes)
    total = xxhash.xxh3_64(head)
    try:
        layout = read_head(head, facts, index.columns, facts.name)
    except DataError as error:
        yield error.problem
        return
    for number in range(facts.leaves):
        leaf = file.read(LEAF_BYTES)
        total.update(leaf)
        if xxhash.xxh3_64_intdigest(leaf) != int(layout.sums[number]):
            begin = facts.head_bytes + number * LEAF_BYTES
            yield f"bytes {begin:,} to {begin + len(leaf):,} are not those that were written"
    if total.hexdigest() != facts.xxh3:
        yield "its sum is not the one in the index"
    yield from _offsets(file, facts, index, layout)


def _offsets(
    file: IO[bytes], facts: ShardFacts, index: DatasetIndex, layout: Layout
) -> Iterator[str]:
    for column in index.columns:
        if column.varying:
            file.seek(layout.begins[column.name + OFFSETS])
            offsets = numpy.frombuffer(file.read(8 * (facts.samples + 1)), dtype="<i8")
            there = layout.lengths[column.name]
            if offsets[0] != 0 or offsets[-1] != there or (numpy.diff(offsets) < 0).any():
                yield f"the offsets of {column.name} do not rise from 0 to {there:,}"


def _beside(folder: Path, index: DatasetIndex) -> Iterator[DatasetProblem]:
    """Check the files that the index names besides the shards."""
    for name, total in files_beside(index).items():
        try:
            if checksum_of(folder / name) != total:
                yield DatasetProblem(name, "its bytes are not those that were written")
        except OSError as error:
            yield DatasetProblem(
                name, "is missing" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
            )


def files_beside(index: DatasetIndex) -> dict[str, str]:
    """Return the plain names of files that belong to a set besides its shards, and their sums."""
    named = index.about.get("files")
    named = named if isinstance(named, dict) else {}
    return {name: str(total) for name, total in named.items() if Path(name).name == name}


def _strays(folder: Path, index: DatasetIndex) -> list[str]:
    ours = {INDEX, *(shard.name for shard in index.shards), *files_beside(index)}
    left = {
        PLAN: " (left by a pack that was interrupted)",
        SPOOL: " (left by a pack that was interrupted)",
    }
    return [
        path.name + left.get(path.name, "")
        for path in sorted(folder.iterdir())
        if path.name not in ours
    ]
