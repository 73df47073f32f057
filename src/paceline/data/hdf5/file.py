"""What an HDF5 file holds, read with care: whoever wrote it may have made mistakes, or want us to open other files."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from paceline.data.pack.columns import select_columns
from paceline.data.shards.shard import WORDS
from paceline.errors import DataError, EnvironmentUnfit, did_you_mean
from paceline.units import human_size

_ENDINGS = {".h5", ".hdf5", ".hdf"}
_HOPS = 16  # links to links
_LEAST_BYTES = 5  # of an encoded chunk: a checksum of 4, and one more


@dataclass(frozen=True)
class H5Column:
    """A dataset whose first axis counts the samples."""

    name: str
    dtype: str
    """As numpy calls it, in this machine's byte order."""
    rows: int
    shape: tuple[int, ...]
    """Of one sample."""
    chunk: tuple[int, ...] = ()
    """Of what is stored together; empty: the rows lie one after the other."""
    filters: tuple[str, ...] = ()

    @cached_property
    def item_bytes(self) -> int:
        """The bytes of one sample."""
        return numpy.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def chunk_rows(self) -> int:
        """How many samples have a part in one chunk."""
        return max(1, min(self.chunk[0], self.rows)) if self.chunk else 1

    @property
    def chunk_bytes(self) -> int:
        """What one chunk holds, decoded."""
        return numpy.dtype(self.dtype).itemsize * math.prod(self.chunk) if self.chunk else 0

    @property
    def chunks(self) -> int:
        """How many chunks there are, if all were written."""
        return (
            math.prod(
                -(-length // part)
                for length, part in zip((self.rows, *self.shape), self.chunk, strict=False)
            )
            if self.chunk
            else 0
        )

    @property
    def chunks_per_sample(self) -> int:
        """In how many chunks one sample lies."""
        return math.prod(
            -(-length // part) for length, part in zip(self.shape, self.chunk[1:], strict=False)
        )

    def __str__(self) -> str:
        chunks = (
            f"chunks {self.chunk} of {human_size(self.chunk_bytes)}"
            if self.chunk
            else "not in chunks"
        )
        spread = (
            f", one sample in {self.chunks_per_sample} of them"
            if self.chunks_per_sample > 1
            else ""
        )
        filters = " + ".join(self.filters) or "not compressed"
        return f"{self.name}: {self.rows:,} samples of {self.dtype} {self.shape}, {chunks}{spread}, {filters}"


def is_hdf5(address: str) -> bool:
    """Return whether an address is that of an HDF5 file, and not of a set.

    >>> is_hdf5("a.h5"), is_hdf5("a"), is_hdf5("s3://bucket/a.h5")
    (True, False, False)
    """
    return Path(address).suffix in _ENDINGS and "://" not in address


def columns_of(file: Any, names: Sequence[str], path: Path) -> tuple[H5Column, ...]:
    """Return the columns of these names; without names all, in the order in which they would be packed: a label is last."""
    with reading(path):
        there = (
            []
            if names
            else [name for name in names_of(file) if not _is_single(find(file, name, path))]
        )
        found = [
            column_at(file, name, path) for name in names or select_columns(there, (), str(path))
        ]
    lengths = {column.name: column.rows for column in found}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name}: {rows:,}" for name, rows in lengths.items()) or "none"
        raise DataError(
            f"the datasets of {path} are not one set of samples ({told})",
            fix="name those of equal length: H5Source(path, columns=[...]), the label last",
        )
    return tuple(found)


def stay_inside(dataset: Any, name: str, path: Path) -> None:
    """Refuse a dataset whose data lie elsewhere: whoever wrote it could make us read any other file."""
    if _is_elsewhere(dataset):
        raise DataError(
            f"{name} of {path} is made of other files or datasets, which are not followed",
            fix="copy the data into one file, or name the datasets that it is made of",
        )


def column_at(file: Any, name: str, path: Path) -> H5Column:
    """Return a dataset as a column, or say why it cannot be one."""
    with reading(path):
        dataset = find(file, name, path)
        stay_inside(dataset, name, path)
        filters = _filters(dataset.id.get_create_plist(), f"{name} of {path}")
        dtype, shape = dataset.dtype, dataset.shape
        if dtype.name not in WORDS:
            raise _not_numbers(dtype, name, path)
        if not shape:
            raise DataError(
                f"{name} of {path} is a single value, not samples",
                fix="leave it out with columns=[...]",
            )
        return H5Column(name, dtype.name, shape[0], shape[1:], dataset.chunks or (), filters)


def dataset_of(file: Any, column: H5Column, path: Path) -> Any:
    """Return the dataset of a column that was looked at before, perhaps by another process."""
    if column_at(file, column.name, path) != column:
        raise DataError(
            f"{column.name} of {path} has changed since it was looked at",
            fix="start again, and let nobody write it meanwhile",
        )
    return find(file, column.name, path)


def check_chunks(dataset: Any, column: H5Column, path: Path) -> None:
    """See that every encoded chunk has a size, in one walk over their list: HDF5 ends the process over a sum of nothing."""
    bad: list[Any] = []

    def look(chunk: Any) -> bool | None:
        if chunk.size >= _LEAST_BYTES:
            return None
        bad.append(chunk)
        return True

    if column.filters:
        with reading(path):
            dataset.id.chunk_iter(look)
    if bad:
        raise DataError(
            f"{column.name} of {path} has a chunk of {bad[0].size} bytes at {bad[0].chunk_offset}",
            fix="fetch or write the file again",
        )


def open_file(path: Path, cache_bytes: int = 0) -> Any:
    """Open a file for reading; where the file system knows no locks, without one.

    With a cache smaller than a chunk, a chunk is read straight to where it shall lie: for a chunk of whole samples that
    is the fastest way, for one with a part of each sample by far the slowest.
    """
    if not path.is_file():  # also: no pipe, which would never open
        raise DataError(
            f"there is no file {path}", fix="check the path; fetch the file, if it is elsewhere"
        )
    with reading(path):
        if not h5py().is_hdf5(path):
            raise DataError(
                f"{path} is not an HDF5 file", fix="check the path, or fetch the file again"
            )
        try:
            return h5py().File(path, "r", rdcc_nbytes=cache_bytes)
        except BlockingIOError as error:
            raise DataError(
                f"{path} is being written by another process", fix="wait until it is done"
            ) from error
        except OSError as error:
            if "lock" not in str(error):
                raise
            return h5py().File(path, "r", rdcc_nbytes=cache_bytes, locking=False)


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turn whatever HDF5 finds wrong into an error that names the file."""
    try:
        yield
    except (
        OSError,
        KeyError,
        ValueError,
        RuntimeError,
        TypeError,
        OverflowError,
        AttributeError,
    ) as error:
        why = (
            "it is truncated"
            if "truncated" in str(error)
            else str(error).strip("'\"") or type(error).__name__
        )
        raise DataError(
            f"{where} cannot be read: {why}", fix="fetch or write the file again"
        ) from error


def h5py() -> Any:
    """Return the package, which is an extra."""
    try:
        import h5py as found  # type: ignore[import-untyped]
    except ImportError as error:
        raise EnvironmentUnfit(
            "HDF5 files need h5py, which is not here", fix="pip install h5py"
        ) from error
    return found


def names_of(file: Any) -> list[str]:
    """Return the names of all datasets; links are not followed."""
    found: list[str] = []
    file.visit(found.append)
    return [name for name in found if isinstance(file[name], h5py().Dataset)]


def find(file: Any, name: str, path: Path) -> Any:
    """Return a dataset; a link may lead to it, but not out of the file: whoever wrote it could make us open any other."""
    links, node, left, hops = h5py().h5l, file["/"], deque(name.split("/")), 0
    while left:
        part = left.popleft().encode("utf-8", "surrogateescape")
        if part in {b"", b"."}:
            continue
        if not isinstance(node, h5py().Group) or not node.id.links.exists(part):
            raise DataError(f"{path} has no dataset {name}", fix=did_you_mean(name, names_of(file)))
        kind = node.id.links.get_info(part).type
        if kind == links.TYPE_HARD:
            node = node[part]
            continue
        if kind != links.TYPE_SOFT or hops == _HOPS:
            raise DataError(
                f"{name} of {path} is a link that leads out of the file, or nowhere",
                fix="copy the data into one file",
            )
        target = os.fsdecode(node.id.links.get_val(part))
        node, hops = (file["/"] if target.startswith("/") else node), hops + 1
        left.extendleft(reversed(target.split("/")))
    if not isinstance(node, h5py().Dataset):
        raise DataError(
            f"{name} of {path} is not a dataset", fix=did_you_mean(name, names_of(file))
        )
    return node


def _is_elsewhere(dataset: Any) -> bool:
    plan = dataset.id.get_create_plist()
    return bool(plan.get_layout() == h5py().h5d.VIRTUAL or plan.get_external_count())


def _filters(plan: Any, where: str) -> tuple[str, ...]:
    """Return how chunks are encoded, if they can be decoded here."""
    found = []
    for number in range(plan.get_nfilters()):
        code, _, _, name = plan.get_filter(number)
        found.append(name.decode("ascii", "replace") or f"filter {code}")
        if not h5py().h5z.filter_avail(code):
            raise DataError(
                f"{where} is compressed with {found[-1]} (filter {code}), which is not here",
                fix="pip install hdf5plugin and import it in the script, or write the file with gzip or lzf",
            )
    return tuple(found)


def _is_single(dataset: Any) -> bool:
    """Return whether a dataset has no axis; of what lies elsewhere nobody asks, for that would open other files."""
    return not _is_elsewhere(dataset) and not dataset.shape


def _not_numbers(dtype: Any, name: str, path: Path) -> DataError:
    if dtype.kind != "O":
        return DataError(
            f"{name} of {path} is of type {dtype}, which is not a number",
            fix="leave it out with columns=[...], or write it as numbers of a fixed width",
        )
    return DataError(
        f"{name} of {path} holds text, or lists of varying length, which cannot be stacked",
        fix=f"leave it out with columns=[...]; or `paceline data pack {path} --to FOLDER`: shards can hold it",
    )
