"""The chunk layout of an HDF5 file: its cost, and how chunks form blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.hdf5.file import H5Column, column_at, find, h5py, names_of, open_file, reading
from paceline.errors import DataError
from paceline.units import human_size

BLOCK_BYTES = 1 << 20
"""The least that is read at a time: blocks of single small chunks would shuffle few samples."""
MOST_BYTES = 1 << 29
"""The most bytes of a block: two windows of 16 such blocks take 16 GB."""
# A block may grow to this size to end where the chunks of all columns end.
_COMMON_BYTES = 1 << 24
# A column up to this size is kept in memory if its chunks do not align with the others.
_KEPT_BYTES = 1 << 22
_SMALL_BYTES = 1 << 12  # a smaller chunk takes longer to find than to read
_MANY = 1000  # small chunks take some milliseconds


class Blocks(NamedTuple):
    """How the columns of a file are read together."""

    rows: int
    """Samples per block: whole chunks of every column, except the columns below."""
    whole: tuple[str, ...] = ()
    """Small columns whose chunks do not align: they are read once and kept in memory."""
    cut: tuple[str, ...] = ()
    """Columns with chunks that span two blocks and are read twice."""


class LayoutProblem(NamedTuple):
    """A problem of the layout of a dataset."""

    cost: str
    fix: str
    here: bool = True
    """Whether it also slows a reader of whole blocks, such as Paceline."""


class Hdf5Layout(NamedTuple):
    """The layout of one dataset of the file."""

    name: str
    column: H5Column | None
    """None if the dataset cannot be a column."""
    problems: tuple[LayoutProblem, ...]

    def facts(self) -> dict[str, Any]:
        """Return the values for JSON."""
        column = asdict(self.column) if self.column else {}
        problems = [problem._asdict() for problem in self.problems]
        return {"name": self.name} | column | {"problems": problems}

    def __str__(self) -> str:
        lines = [str(self.column or f"{self.name}: cannot be read as samples")]
        for problem in self.problems:
            lines += [f"  cost: {problem.cost}", f"  fix: {problem.fix}"]
        return "\n".join(lines)


def inspect(path: Path | str) -> list[Hdf5Layout]:
    """Return the layout of every dataset of a file; no data are read."""
    path = Path(path)
    with open_file(path) as file, reading(path):
        return [_layout_of(file, name, path) for name in names_of(file)]


def _layout_of(file: Any, name: str, path: Path) -> Hdf5Layout:
    try:
        column = column_at(file, name, path)
    except DataError as error:
        return Hdf5Layout(name, None, (LayoutProblem(error.problem, error.fix),))
    problems = problems_of(column, path)
    written = find(file, name, path).id.get_num_chunks() if column.chunk else 0
    missing = column.chunks - int(written)
    if missing:
        text = f"{missing:,} of its chunks were never written: their samples are all the fill value"
        problems.append(LayoutProblem(text, "write the file again if these samples should exist"))
    return Hdf5Layout(name, column, tuple(problems))


def problems_of(column: H5Column, path: Path) -> list[LayoutProblem]:
    """Return the problems of a column's chunks, with their cost."""
    fix = better(column, path)
    size, times = human_size(column.chunk_bytes), f"decoded {column.chunk_rows:,} times per epoch"
    problems = []
    if column.chunks_per_sample > 1:
        spread = f"one sample lies in {column.chunks_per_sample:,} chunks of {size}"
        text = f"{spread}: read sample by sample, every chunk is {times}; {_block_cost(column)}"
        problems.append(LayoutProblem(text, fix))
    if 0 < column.chunk_bytes < min(_SMALL_BYTES, column.rows * column.item_bytes):
        count = f"{BLOCK_BYTES // column.chunk_bytes:,}"
        text = f"chunks of {size} take longer to find than to read: {count} per MB"
        problems.append(LayoutProblem(text, fix, here=column.chunks >= _MANY))
    cache = h5py().h5p.create(h5py().h5p.FILE_ACCESS).get_cache()[2]
    if column.chunk_bytes > cache:
        text = f"a chunk of {size} does not fit into HDF5's cache of {human_size(cache)}"
        text += f": read sample by sample, it is {times}; Paceline decodes it once"
        problems.append(LayoutProblem(text, fix, here=False))
    return problems


def _block_cost(column: H5Column) -> str:
    block = column.chunk_rows * column.item_bytes
    rows = f"{column.chunk_rows:,} samples ({human_size(block)})"
    if block > MOST_BYTES:
        return f"Paceline reads at least {rows} at a time, which is too much: it refuses the file"
    return f"Paceline reads at least {rows} at a time"


def better(column: H5Column, path: Path) -> str:
    """Return the fix for a bad layout: pack the file, or write it with better chunks."""
    rows = max(1, min(column.rows, BLOCK_BYTES // max(1, column.item_bytes)))
    call = f"create_dataset({column.name!r}, ..., chunks={(rows, *column.shape)})"
    return f"`paceline data pack {path} --to FOLDER`, or write it with h5py's {call}"


def plan_blocks(columns: Sequence[H5Column], block_bytes: int = BLOCK_BYTES) -> Blocks:
    """Divide columns into blocks of about `block_bytes`, of whole chunks if possible.

    >>> plan_blocks([H5Column("x", "uint8", 6000, (64,), (64, 64)), H5Column("y", "int64", 6000, (), (96,))], 20_000)
    Blocks(rows=192, whole=(), cut=())
    """
    sample_bytes = max(1, sum(column.item_bytes for column in columns))
    size = max(1, columns[0].rows)
    small = [column for column in columns if column.rows * column.item_bytes <= _KEPT_BYTES]
    for kept in ([], small):
        lengths = [column.chunk_rows for column in columns if column not in kept] or [1]
        largest, common = max(lengths), min(size, math.lcm(*lengths))
        if common == largest or common * sample_bytes <= _COMMON_BYTES:
            break
    else:
        common = largest
    rows = min(size, common * max(1, round(block_bytes / (common * sample_bytes))))
    uneven = [column for column in columns if rows < size and rows % column.chunk_rows]
    whole = tuple(column.name for column in uneven if column in kept)
    cut = tuple(column.name for column in uneven if column not in kept)
    return Blocks(rows, whole, cut)


def check_size(columns: Sequence[H5Column], plan: Blocks, path: Path) -> None:
    """Refuse a file whose blocks are too large for memory."""
    size = plan.rows * sum(column.item_bytes for column in columns)
    if size <= MOST_BYTES:
        return
    worst = max(columns, key=lambda column: column.chunk_rows * column.item_bytes)
    why = "and a block holds at least one sample"
    if worst.chunk_rows > 1:
        why = f"because every chunk of {worst.name} holds a part of {worst.chunk_rows:,} samples"
    raise DataError(
        f"{path} cannot be read in bounded memory: a block of {plan.rows:,} samples takes "
        f"{human_size(size)} (limit {human_size(MOST_BYTES)}), {why}",
        fix=better(worst, path),
    )
