"""Pack rows of the datasets of an HDF5 file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from paceline.data.pack.columns import check_lengths, refuse_parts, select_columns, storable_dtype
from paceline.data.pack.inputs import PackContext, Prepared
from paceline.data.pack.optional_packages import import_optional
from paceline.data.pack.ragged import make_varying
from paceline.data.pack.request import PackRequest
from paceline.data.shards.shard import Array, Rows, Varying
from paceline.errors import ConfigError, DataError

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")


@dataclass(frozen=True)
class Hdf5:
    """Datasets of equal length, each a column."""

    path: str
    datasets: Sequence[str]
    samples: int
    group: int = 0
    """Samples per row, with --flatten; 0: a row is a sample."""

    def read(self, begin: int, end: int) -> Rows:
        """Return some samples of every dataset."""
        with _opened(self.path) as file:
            if self.group:
                return {_column(name): self._flat(file, name, begin, end) for name in self.datasets}
            return {_column(name): self._rows(file, name, begin, end) for name in self.datasets}

    def _flat(self, file: Any, name: str, begin: int, end: int) -> Array | Varying:
        """Return some samples of rows that hold a group of them each, or one value for the whole group."""
        first, last = begin // self.group, -(-end // self.group)
        rows = self._rows(file, name, first, last)
        assert isinstance(rows, numpy.ndarray)  # _group_of refuses rows of varying length
        flat = rows.repeat(self.group) if rows.ndim == 1 else rows.reshape(-1, *rows.shape[2:])
        return numpy.ascontiguousarray(flat[begin - first * self.group : end - first * self.group])

    def _rows(self, file: Any, name: str, begin: int, end: int) -> Array | Varying:
        dataset = file[name]
        try:
            values = dataset[begin:end]
        except OSError as error:
            raise DataError(
                f"cannot read rows {begin} to {end} of {name} in {self.path}: {error}",
                fix="create or download the file again",
            ) from error
        element = _element_type(dataset)
        if element is not None:
            return make_varying(list(values), element)
        return numpy.ascontiguousarray(values, dtype=storable_dtype(values.dtype, name, self.path))

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Hdf5:
        """Rebuild the object from the dict of `tree`."""
        return cls(**tree)


def prepare_hdf5(request: PackRequest, files: Sequence[Path], context: PackContext) -> Prepared:
    """Find the selected datasets."""
    from paceline.data.hdf5.file import stay_inside  # it imports columns.py of this package

    path = str(files[0].absolute())
    with _opened(path) as file:
        datasets: dict[str, Any] = {}

        def add(name: str, item: Any) -> None:
            if getattr(item, "shape", ()):
                datasets[name] = item

        file.visititems(add)
        names = select_columns(list(datasets), request.columns, str(files[0]))
        if len({_column(name) for name in names}) < len(names):
            raise ConfigError(
                f"{files[0]}: two columns would have the same name",
                fix="select one of them with --columns",
            )
        for name in names:
            stay_inside(datasets[name], name, files[0])
            if _element_type(datasets[name]) is None:
                storable_dtype(datasets[name].dtype, name, str(files[0]))
        if not request.columns:
            refuse_parts(names, str(files[0]))
        samples = check_lengths({name: datasets[name].shape[0] for name in names}, str(files[0]))
        group = 0
        if request.flatten:
            group = _group_of({name: datasets[name] for name in names}, str(files[0]))
    return Prepared(Hdf5(path, names, samples * (group or 1), group))


def _group_of(datasets: Mapping[str, Any], where: str) -> int:
    """Return the number of samples per row: the second axis, which all datasets have that have several axes."""
    sizes = {each.shape[1] for each in datasets.values() if each.ndim > 1}
    varying = any(each.ndim == 1 and _element_type(each) is not None for each in datasets.values())
    if varying or len(sizes) != 1 or sizes == {0}:
        listed = ", ".join(f"{name} {each.shape}" for name, each in datasets.items())
        raise ConfigError(
            f"--flatten needs datasets of numbers of the shapes (groups, samples, ...) or (groups), {where} has {listed}",
            fix="choose such datasets with --columns",
        )
    return int(sizes.pop())


def _column(name: str) -> str:
    return name.replace("/", ".")  # column names cannot contain a slash


def _element_type(dataset: Any) -> numpy.dtype[Any] | None:
    """Return the element type of rows of varying length, None for rows of equal shape."""
    h5py = import_optional("h5py", "an HDF5 file")
    if dataset.ndim != 1:
        return None
    if h5py.check_string_dtype(dataset.dtype) is not None:
        return numpy.dtype("u1")
    inner = h5py.check_vlen_dtype(dataset.dtype)
    return (
        None
        if inner is None
        else storable_dtype(numpy.dtype(inner), dataset.name, dataset.file.filename)
    )


def _opened(path: str) -> Any:
    h5py = import_optional("h5py", "an HDF5 file")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(
            f"cannot read {path} as HDF5: {error}", fix="create or download the file again"
        ) from error
