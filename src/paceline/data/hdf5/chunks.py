"""How samples lie in an HDF5 file: which datasets, in what chunks, and what it costs to read them."""

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
"""What is read together, at least, if the file has as much: small chunks by themselves would mix few samples."""
MOST_BYTES = 1 << 29
"""Of one block: a window of 16 of them would take 16 GB."""
_COMMON_BYTES = (
    1 << 24
)  # how large a block may become so that it ends where the chunks of all columns end
_KEPT_BYTES = (
    1 << 22
)  # a column of no more bytes is kept whole, if its chunks do not fit the others'
_SMALL_BYTES = 1 << 12  # a chunk of less takes longer to find than to read
_MANY = 1000  # of them take some milliseconds


class Blocks(NamedTuple):
    """How the columns of a file are read together."""

    rows: int
    """Samples of a block: whole chunks of every column, but for those below."""
    whole: tuple[str, ...] = ()
    """Small columns whose chunks end elsewhere: they are read once, and kept."""
    cut: tuple[str, ...] = ()
    """Columns with chunks that lie in two blocks, and are read for each."""


class LayoutProblem(NamedTuple):
    """What is bad about a dataset."""

    cost: str
    fix: str
    here: bool = True
    """Whether it also costs a reader that takes whole blocks, as Paceline does."""


class Hdf5Layout(NamedTuple):
    """What is known of one dataset."""

    name: str
    column: H5Column | None
    """Nothing, if it cannot be a column at all."""
    problems: tuple[LayoutProblem, ...]

    def facts(self) -> dict[str, Any]:
        """Return the same for JSON."""
        problems = [
            {"cost": problem.cost, "fix": problem.fix, "here": problem.here}
            for problem in self.problems
        ]
        return (
            {"name": self.name}
            | (asdict(self.column) if self.column else {})
            | {"problems": problems}
        )

    def __str__(self) -> str:
        told = [f"  cost: {problem.cost}\n  fix: {problem.fix}" for problem in self.problems]
        return "\n".join(
            [str(self.column) if self.column else f"{self.name}: cannot be read as samples", *told]
        )


def inspect(path: Path | str) -> list[Hdf5Layout]:
    """Look at every dataset of a file; nothing but its structure is read."""
    path = Path(path)
    with open_file(path) as file, reading(path):
        return [_finding(file, name, path) for name in names_of(file)]


def _finding(file: Any, name: str, path: Path) -> Hdf5Layout:
    try:
        column = column_at(file, name, path)
    except DataError as error:
        return Hdf5Layout(name, None, (LayoutProblem(error.problem, error.fix),))
    problems = problems_of(column, path)
    if missing := column.chunks - int(
        find(file, name, path).id.get_num_chunks() if column.chunk else 0
    ):
        text = f"{missing:,} of its chunks were never written: their samples are all the fill value"
        problems.append(LayoutProblem(text, "write the file again, if they should be there"))
    return Hdf5Layout(name, column, tuple(problems))


def problems_of(column: H5Column, path: Path) -> list[LayoutProblem]:
    """Return what a column's chunks cost."""
    fix, rows, size = better(column, path), f"{column.chunk_rows:,}", human_size(column.chunk_bytes)
    found = []
    if column.chunks_per_sample > 1:
        block = column.chunk_rows * column.item_bytes
        here = f"here blocks are of {rows} samples ({human_size(block)}) at least"
        here += ", which is too much: the file is refused" if block > MOST_BYTES else ""
        where = f"one sample lies in {column.chunks_per_sample:,} chunks of {size}"
        text = f"{where}: read sample by sample, every chunk is decoded {rows} times in an epoch; {here}"
        found.append(LayoutProblem(text, fix))
    if 0 < column.chunk_bytes < min(_SMALL_BYTES, column.rows * column.item_bytes):
        each = f"{BLOCK_BYTES // column.chunk_bytes:,}"
        text = f"chunks of {size} take longer to find than to read: {each} for every MB"
        found.append(LayoutProblem(text, fix, here=column.chunks >= _MANY))
    if column.chunk_bytes > (cache := h5py().h5p.create(h5py().h5p.FILE_ACCESS).get_cache()[2]):
        text = f"a chunk of {size} does not fit into HDF5's cache of {human_size(cache)}: read sample by sample, it is decoded {rows} times in an epoch; here once"
        found.append(LayoutProblem(text, fix, here=False))
    return found


def better(column: H5Column, path: Path) -> str:
    """Return how to lay a column out well."""
    rows = max(1, min(column.rows, BLOCK_BYTES // max(1, column.item_bytes)))
    call = f"create_dataset({column.name!r}, ..., chunks={(rows, *column.shape)})"
    return f"`paceline data pack {path} --to FOLDER`, or write it with h5py's {call}"


def plan_blocks(columns: Sequence[H5Column], block_bytes: int = BLOCK_BYTES) -> Blocks:
    """Return how to cut columns into blocks of about so many bytes, so that every chunk lies in one block, if it can be.

    >>> plan_blocks([H5Column("x", "uint8", 6000, (64,), (64, 64)), H5Column("y", "int64", 6000, (), (96,))], 20_000)
    Blocks(rows=192, whole=(), cut=())
    """
    each, size = max(1, sum(column.item_bytes for column in columns)), max(1, columns[0].rows)
    small = [column for column in columns if column.rows * column.item_bytes <= _KEPT_BYTES]
    for kept in ([], small):
        lengths = [column.chunk_rows for column in columns if column not in kept] or [1]
        largest, common = max(lengths), min(size, math.lcm(*lengths))
        if common == largest or common * each <= _COMMON_BYTES:
            break
    else:
        common = largest
    rows = min(size, common * max(1, round(block_bytes / (common * each))))
    whole = tuple(column.name for column in kept if rows < size and rows % column.chunk_rows)
    uneven = (column.name for column in columns if rows < size and rows % column.chunk_rows)
    return Blocks(rows, whole, tuple(name for name in uneven if name not in whole))


def check_size(columns: Sequence[H5Column], plan: Blocks, path: Path) -> None:
    """Refuse what cannot be read in bounded memory."""
    size = plan.rows * sum(column.item_bytes for column in columns)
    if size > MOST_BYTES:
        worst = max(columns, key=lambda column: column.chunk_rows * column.item_bytes)
        why = (
            f"as every chunk of {worst.name} holds a part of so many"
            if worst.chunk_rows > 1
            else "and less is none"
        )
        raise DataError(
            f"{path} cannot be read in bounded memory: a block of {plan.rows:,} samples takes {human_size(size)}, {why}",
            fix=better(worst, path),
        )
