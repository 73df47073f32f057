"""Pack rows of Parquet files, row group by row group."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from paceline.data.pack.columns import check_lengths, select_columns
from paceline.data.pack.inputs import PackContext, Prepared
from paceline.data.pack.optional_packages import import_optional
from paceline.data.pack.request import PackRequest
from paceline.data.shards.shard import Array, Rows, Varying
from paceline.dtypes import SAFETENSORS_NAMES
from paceline.errors import DataError

PARQUET = (".parquet", ".pq")


@dataclass
class Table:
    """The row groups of all files, in order."""

    groups: Sequence[Sequence[Any]]
    """File, number in the file, and rows of each group."""
    columns: Sequence[str]
    numbers: dict[str, str]
    """Type of text columns that contain numbers, by name."""
    where: str
    _held: tuple[int, Any] = field(default=(-1, None), init=False, repr=False)
    """Number and content of the group read last, which may span several shards."""

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(group[2] for group in self.groups))

    @property
    def samples(self) -> int:
        """The number of rows."""
        return self._ends[-1]

    def read(self, begin: int, end: int) -> Rows:
        """Return some rows."""
        pyarrow = import_optional("pyarrow", "a table")
        parts = []
        for number in range(bisect_right(self._ends, begin), bisect_left(self._ends, end) + 1):
            first = self._ends[number] - self.groups[number][2]
            low, high = max(begin, first), min(end, self._ends[number])
            parts.append(self._group(number).slice(low - first, high - low))
        table = pyarrow.concat_tables(parts)
        return {name: self._values(name, table.column(name), begin) for name in self.columns}

    def _group(self, number: int) -> Any:
        if self._held[0] != number:
            path, group, _ = self.groups[number]
            with _opened(path) as file:
                try:
                    self._held = (
                        number,
                        file.read_row_group(group, columns=list(self.columns), use_threads=False),
                    )
                except (OSError, ValueError) as error:
                    raise _unreadable(path, error) from error
        return self._held[1]

    def _values(self, name: str, values: Any, begin: int) -> Array | Varying:
        """Return the rows of one column as numpy arrays."""
        pyarrow = import_optional("pyarrow", "a table")
        if values.null_count:
            row = begin + values.is_null().index(pyarrow.scalar(value=True)).as_py()
            raise _empty_cell(self.where, name, row)
        array = pyarrow.concat_arrays(values.chunks) if values.num_chunks != 1 else values.chunk(0)
        if name in self.numbers:
            trimmed = import_optional("pyarrow.compute", "a table").utf8_trim_whitespace(array)
            return to_numpy(trimmed.cast(self.numbers[name]))
        if pyarrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        converted = _converted(array)
        if converted is None:
            raise _empty_cell(self.where, name, begin)
        return converted

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        return {name: getattr(self, name) for name in ("groups", "columns", "numbers", "where")}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Table:
        """Rebuild the object from the dict of `tree`."""
        return cls(**tree)


def to_numpy(array: Any) -> Array:
    """Return an Arrow array as a contiguous numpy array."""
    return numpy.ascontiguousarray(array.to_numpy(zero_copy_only=False))


def _converted(array: Any) -> Array | Varying | None:
    """Return numbers, text or lists of numbers; None if a list contains a null."""
    types = import_optional("pyarrow", "a table").types
    if (
        types.is_list(array.type)
        or types.is_large_list(array.type)
        or types.is_fixed_size_list(array.type)
    ):
        inner = array.flatten()
        if inner.null_count:
            return None
        if types.is_fixed_size_list(array.type):
            return to_numpy(inner).reshape(len(array), array.type.list_size)
        offsets = to_numpy(array.offsets).astype(numpy.int64)
        return Varying(to_numpy(inner), offsets - offsets[0])
    if _is_text(array.type):
        array = array.cast("large_binary")
        _, positions, content = array.buffers()
        offsets = numpy.frombuffer(positions, numpy.int64)
        offsets = offsets[array.offset : array.offset + len(array) + 1]
        flat = numpy.frombuffer(content or b"", numpy.uint8)[offsets[0] : offsets[-1]]
        return Varying(flat, offsets - offsets[0])
    return to_numpy(array)


def _is_text(kind: Any) -> bool:
    types = import_optional("pyarrow", "a table").types
    return any(
        getattr(types, f"is_{name}")(kind)
        for name in ("string", "large_string", "binary", "large_binary", "fixed_size_binary")
    )


def prepare_parquet(request: PackRequest, files: Sequence[Path], context: PackContext) -> Prepared:
    """Find the row groups; raise unless all files have the same columns."""
    groups: list[list[Any]] = []
    schemas = []
    for path in files:
        with _opened(str(path)) as file:
            counts = [
                file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)
            ]
            for number, rows in enumerate(counts):
                if rows:
                    groups.append([str(path.absolute()), number, rows])
            schema = file.schema_arrow
            schemas.append({name: schema.field(name).type for name in schema.names})
    names = select_columns(list(schemas[0]), request.columns, str(files[0]))
    for path, types in zip(files, schemas, strict=True):
        for name in names:
            _check_type(schemas[0][name], types.get(name), name, path)
    check_lengths(
        dict.fromkeys(names, sum(group[2] for group in groups)), ", ".join(map(str, files))
    )
    return Prepared(Table(groups, names, {}, str(files[0])))


def _check_type(first: Any, kind: Any, name: str, path: Path) -> None:
    types = import_optional("pyarrow", "a table").types
    if kind != first:
        raise DataError(
            f"{path}: {name} is {kind or 'missing'}, but {first} in the first file",
            fix="pack these files separately",
        )
    if types.is_dictionary(kind):
        kind = kind.value_type
    inner = kind.value_type if types.is_nested(kind) and hasattr(kind, "value_type") else kind
    if not _is_text(kind) and SAFETENSORS_NAMES.get(_numpy_name(inner)) is None:
        raise DataError(
            f"{path}: {name} has type {kind}, which a shard cannot store",
            fix="select other columns with --columns, or convert it to numbers",
        )


def _numpy_name(kind: Any) -> str:
    types = import_optional("pyarrow", "a table").types
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return str(kind)
    return str(numpy.dtype(kind.to_pandas_dtype()).name)


def _opened(path: str) -> Any:
    parquet = import_optional("pyarrow.parquet", "a Parquet file")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(
        f"cannot read {path} as Parquet: {error}", fix="create or download the file again"
    )


def _empty_cell(where: str, name: str, row: int) -> DataError:
    return DataError(
        f"{where}: {name} has an empty cell in or after row {row + 1:,}",
        fix="fill or remove such rows, or select other columns with --columns",
    )
