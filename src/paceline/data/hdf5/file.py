"""Datasets of an HDF5 file.

The file may be damaged, or written to make a reader open other files.
"""

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

from paceline.data.pack.columns import refuse_parts, select_columns
from paceline.dtypes import SAFETENSORS_NAMES
from paceline.errors import DataError, EnvironmentUnfit, did_you_mean
from paceline.units import human_size

_ENDINGS = {".h5", ".hdf5", ".hdf"}
_MOST_LINKS = 16  # in a chain of links
_LEAST_BYTES = 5  # of an encoded chunk: a checksum of 4, and one byte
_HDF5_ERRORS = (
    OSError, KeyError, ValueError, RuntimeError, TypeError, OverflowError, AttributeError,
)  # fmt: skip


@dataclass(frozen=True)
class H5Column:
    """A dataset of the file whose first axis counts the samples."""

    name: str
    dtype: str
    """The numpy name, in the byte order of this machine."""
    rows: int
    shape: tuple[int, ...]
    """The shape of one sample."""
    chunk: tuple[int, ...] = ()
    """The shape of one chunk; () if the dataset is contiguous."""
    filters: tuple[str, ...] = ()

    @cached_property
    def item_bytes(self) -> int:
        """The bytes of one sample."""
        return numpy.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def chunk_rows(self) -> int:
        """Samples of which one chunk holds at least a part."""
        return max(1, min(self.chunk[0], self.rows)) if self.chunk else 1

    @property
    def chunk_bytes(self) -> int:
        """The size of one decoded chunk."""
        return numpy.dtype(self.dtype).itemsize * math.prod(self.chunk) if self.chunk else 0

    @property
    def chunks(self) -> int:
        """The number of chunks, if all were written."""
        if not self.chunk:
            return 0
        return _chunk_count((self.rows, *self.shape), self.chunk)

    @property
    def chunks_per_sample(self) -> int:
        """The number of chunks that hold a part of one sample."""
        return _chunk_count(self.shape, self.chunk[1:])

    def __str__(self) -> str:
        chunks = "not chunked"
        if self.chunk:
            chunks = f"chunks {self.chunk} of {human_size(self.chunk_bytes)}"
        if self.chunks_per_sample > 1:
            chunks += f", one sample in {self.chunks_per_sample} of them"
        filters = " + ".join(self.filters) or "not compressed"
        samples = f"{self.rows:,} samples of {self.dtype} {self.shape}"
        return f"{self.name}: {samples}, {chunks}, {filters}"


def _chunk_count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    return math.prod(-(-length // part) for length, part in zip(shape, chunk, strict=False))


def is_hdf5(address: str) -> bool:
    """Return whether an address names a local HDF5 file, by its suffix.

    >>> is_hdf5("a.h5"), is_hdf5("a"), is_hdf5("s3://bucket/a.h5")
    (True, False, False)
    """
    return Path(address).suffix in _ENDINGS and "://" not in address


def columns_of(file: Any, names: Sequence[str], path: Path) -> tuple[H5Column, ...]:
    """Return the columns with these names.

    Without names all of them, in the order of `pack`: a label is last.
    """
    with reading(path):
        if not names:
            arrays = [name for name in names_of(file) if not _is_single(find(file, name, path))]
            names = select_columns(arrays, (), str(path))
            refuse_parts(names, str(path))
        columns = [column_at(file, name, path) for name in names]
    lengths = {column.name: column.rows for column in columns}
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name}: {rows:,}" for name, rows in lengths.items()) or "none"
        raise DataError(
            f"the datasets of {path} must have the same number of samples, got {listed}",
            fix="choose datasets of equal length: H5Source(path, columns=[...]), the label last",
        )
    return tuple(columns)


def stay_inside(dataset: Any, name: str, path: Path) -> None:
    """Refuse a dataset whose data lie in other files, which could be any file of this machine."""
    if _is_elsewhere(dataset):
        raise DataError(
            f"{name} of {path} is made of other files or datasets (virtual or external), which are not followed",
            fix="copy the data into one file, or choose the datasets that it is made of",
        )


def column_at(file: Any, name: str, path: Path) -> H5Column:
    """Describe a dataset as a column; the error says why it cannot be one."""
    with reading(path):
        dataset = find(file, name, path)
        stay_inside(dataset, name, path)
        filters = _filters(dataset.id.get_create_plist(), f"{name} of {path}")
        dtype, shape = dataset.dtype, dataset.shape
        if dtype.name not in SAFETENSORS_NAMES:
            raise _not_numbers(dtype, name, path)
        if not shape:
            raise DataError(
                f"{name} of {path} is a single value, not an array of samples",
                fix="choose other datasets with columns=[...]",
            )
        return H5Column(name, dtype.name, shape[0], shape[1:], dataset.chunks or (), filters)


def dataset_of(file: Any, column: H5Column, path: Path) -> Any:
    """Return the dataset of a column that was described before, perhaps by another process."""
    if column_at(file, column.name, path) != column:
        raise DataError(
            f"{column.name} of {path} has changed since it was opened",
            fix="start again, and do not write the file during a training",
        )
    return find(file, column.name, path)


def check_chunks(dataset: Any, column: H5Column, path: Path) -> None:
    """Check that no encoded chunk is empty: HDF5 crashes the process over the checksum of one."""
    bad: list[Any] = []

    def stop_at_bad(chunk: Any) -> bool | None:
        if chunk.size >= _LEAST_BYTES:
            return None
        bad.append(chunk)
        return True

    if column.filters:
        with reading(path):
            dataset.id.chunk_iter(stop_at_bad)
    if bad:
        raise DataError(
            f"{column.name} of {path} has a chunk of {bad[0].size} bytes at {bad[0].chunk_offset}",
            fix="download or write the file again",
        )


def open_file(path: Path, cache_bytes: int = 0) -> Any:
    """Open a file for reading; without a lock if the file system has none.

    With a cache smaller than a chunk, HDF5 decodes a chunk straight into the destination:
    the fastest way for chunks of whole samples, and by far the slowest for chunks with a
    part of each sample.
    """
    if not path.is_file():  # also refuses a pipe, which would never open
        raise DataError(f"there is no file {path}", fix="check the path, or download the file")
    with reading(path):
        if not h5py().is_hdf5(path):
            raise DataError(
                f"{path} is not an HDF5 file", fix="check the path, or download the file again"
            )
        try:
            return h5py().File(path, "r", rdcc_nbytes=cache_bytes)
        except BlockingIOError as error:
            raise DataError(
                f"{path} is being written by another process", fix="wait until that process is done"
            ) from error
        except OSError as error:
            if "lock" not in str(error):
                raise
            return h5py().File(path, "r", rdcc_nbytes=cache_bytes, locking=False)


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turn any error of HDF5 into one that names the file."""
    try:
        yield
    except _HDF5_ERRORS as error:
        why = str(error).strip("'\"") or type(error).__name__
        if "truncated" in why:
            why = "it is truncated"
        raise DataError(
            f"{where} cannot be read: {why}", fix="download or write the file again"
        ) from error


def h5py() -> Any:
    """Import h5py, which is an optional dependency."""
    try:
        import h5py as package  # type: ignore[import-untyped]
    except ImportError as error:
        raise EnvironmentUnfit(
            "HDF5 files need h5py, which is not installed", fix="pip install h5py"
        ) from error
    return package


def names_of(file: Any) -> list[str]:
    """Return the names of all datasets; links are not followed."""
    names: list[str] = []
    file.visit(names.append)
    return [name for name in names if isinstance(file[name], h5py().Dataset)]


def find(file: Any, name: str, path: Path) -> Any:
    """Return a dataset by name.

    Links within the file are followed; a link to another file is refused.
    """
    links, node, parts, followed = h5py().h5l, file["/"], deque(name.split("/")), 0
    while parts:
        part = parts.popleft().encode("utf-8", "surrogateescape")
        if part in {b"", b"."}:
            continue
        if not isinstance(node, h5py().Group) or not node.id.links.exists(part):
            raise DataError(f"{path} has no dataset {name}", fix=did_you_mean(name, names_of(file)))
        kind = node.id.links.get_info(part).type
        if kind == links.TYPE_HARD:
            node = node[part]
            continue
        if kind != links.TYPE_SOFT or followed == _MOST_LINKS:
            raise DataError(
                f"{name} of {path} is a link that leads out of the file, or to no dataset",
                fix="copy the data into one file",
            )
        target = os.fsdecode(node.id.links.get_val(part))
        node, followed = (file["/"] if target.startswith("/") else node), followed + 1
        parts.extendleft(reversed(target.split("/")))
    if not isinstance(node, h5py().Dataset):
        raise DataError(
            f"{name} of {path} is not a dataset", fix=did_you_mean(name, names_of(file))
        )
    return node


def _is_elsewhere(dataset: Any) -> bool:
    plan = dataset.id.get_create_plist()
    return bool(plan.get_layout() == h5py().h5d.VIRTUAL or plan.get_external_count())


def _filters(plan: Any, where: str) -> tuple[str, ...]:
    """Return the names of the filters of a dataset; the error names one that is not installed."""
    names = []
    for number in range(plan.get_nfilters()):
        code, _, _, name = plan.get_filter(number)
        names.append(name.decode("ascii", "replace") or f"filter {code}")
        if not h5py().h5z.filter_avail(code):
            raise DataError(
                f"{where} is compressed with {names[-1]} (filter {code}), which is not installed",
                fix="pip install hdf5plugin and import it in the script, or write the file with gzip or lzf",
            )
    return tuple(names)


def _is_single(dataset: Any) -> bool:
    """Return whether a dataset is a scalar.

    External data are not asked: that would open other files.
    """
    return not _is_elsewhere(dataset) and not dataset.shape


def _not_numbers(dtype: Any, name: str, path: Path) -> DataError:
    if dtype.kind != "O":
        return DataError(
            f"{name} of {path} has the type {dtype}, which is not a number",
            fix="choose other datasets with columns=[...], or write it as numbers of a fixed width",
        )
    return DataError(
        f"{name} of {path} holds text, or lists of varying length, which cannot be stacked",
        fix=f"choose other datasets with columns=[...]; or `paceline data pack {path} --to FOLDER`: shards support it",
    )
