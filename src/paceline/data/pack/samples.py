"""Pack samples that a program yields one by one."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from paceline.data.pack.columns import columns_of, storable_dtype
from paceline.data.pack.plan import Journal, locked_folder, plan_in
from paceline.data.pack.ragged import make_varying
from paceline.data.pack.request import SHARD_BYTES
from paceline.data.pack.shard_writer import samples_in, write_rows
from paceline.data.shards.index import INDEX, DatasetIndex
from paceline.data.shards.shard import Array, Rows
from paceline.errors import ConfigError, DataError
from paceline.rundir import write_whole

_FIRST = 64  # samples from which types and sizes are inferred
_PLAN = "samples "

Sample = Mapping[str, Any]


def pack_samples(
    samples: Iterable[Sample],
    folder: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    varying: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
    force: bool = False,
) -> DatasetIndex:
    """Write samples to a folder as a dataset of shards, for `paceline.open_dataset`; return its index.

    - `samples`: each maps columns to arrays, numbers, strings or bytes. The first sample defines the columns and their
      order.
    - `folder`: must be new or empty; what an interrupted call has left there is replaced.
    - `shard_bytes`: the size of a shard.
    - `varying`: columns whose flat arrays may have any length, as strings and bytes always may; a column whose first
      samples differ in length is one of them without being named.
    - `about`: facts to keep with the dataset, as JSON.
    - `force`: replace another dataset that is there.

    >>> index = paceline.pack_samples([{"x": i, "text": "a" * i} for i in range(5)], "five")
    >>> index.samples
    5
    """
    rest, folder, about = iter(samples), Path(folder), _as_json(about or {})
    first = list(itertools.islice(rest, _FIRST))
    if not first:
        raise ConfigError("there are no samples to pack", fix="pass at least one")
    cells = {
        name: _cell(name, [_value(sample, name, 0) for sample in first], name in varying)
        for name in first[0]
    }
    rows = _rows(first, cells, 0)
    columns, each = columns_of(rows), samples_in(shard_bytes, rows)
    with locked_folder(folder):
        journal = Journal(folder, _PLAN + secrets.token_hex(8))
        journal.begin(force=force or _was_interrupted(folder))
        for number, batch in enumerate(_batches(itertools.chain(first, rest), each)):
            journal.note(write_rows(folder, number, columns, _rows(batch, cells, number * each)))
        index = DatasetIndex(columns, each, tuple(journal.finished.values()), about)
        write_whole(folder / INDEX, index.to_json())
        journal.end()
    return index


def _as_json(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as it will be read back from the index."""
    try:
        stored: dict[str, Any] = json.loads(json.dumps(about))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"about= cannot be written as JSON: {error}",
            fix="use strings, numbers, lists and dicts",
        ) from error
    return stored


def _was_interrupted(folder: Path) -> bool:
    """Return whether a folder contains an interrupted pack of samples, which always starts over."""
    return not (folder / INDEX).exists() and "".join(plan_in(folder)[:1]).startswith(_PLAN)


def _batches(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    while batch := list(itertools.islice(samples, size)):
        yield batch


class _Cell(NamedTuple):
    """Type and shape of a column in every sample."""

    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    varying: bool


def _cell(name: str, values: Sequence[Any], varying: bool) -> _Cell:  # noqa: FBT001 - private
    """Infer type and shape of a column from its first values."""
    if all(isinstance(value, str | bytes) for value in values):
        return _Cell(numpy.dtype("u1"), (), varying=True)
    arrays = [numpy.asarray(value) for value in values]
    typed = [array for array in arrays if array.size] or arrays  # an empty list has no type
    dtype = storable_dtype(numpy.result_type(*typed), name, "the first samples")
    shapes = {array.shape for array in arrays}
    if varying or (len(shapes) > 1 and all(len(shape) == 1 for shape in shapes)):
        return _Cell(dtype, (), varying=True)
    return _Cell(dtype, arrays[0].shape, varying=False)


def _rows(samples: Sequence[Sample], cells: Mapping[str, _Cell], begin: int) -> Rows:
    """Return samples as columns."""
    rows: dict[str, Any] = {}
    for name, cell in cells.items():
        values = [
            _checked(_value(sample, name, number), name, cell, number)
            for number, sample in enumerate(samples, begin)
        ]
        rows[name] = make_varying(values, cell.dtype) if cell.varying else numpy.stack(values)
    for number, sample in enumerate(samples, begin):
        if len(sample) != len(cells):
            raise DataError(
                f"sample {number} has columns {', '.join(sample)}, the first {', '.join(cells)}",
                fix="give every sample the same columns",
            )
    return rows


def _value(sample: Sample, name: str, number: int) -> Any:
    try:
        return sample[name]
    except KeyError as error:
        raise DataError(
            f"sample {number} has no column {name}", fix="give every sample the same columns"
        ) from error


def _checked(value: Any, name: str, cell: _Cell, number: int) -> Any:
    """Return a value in the type of its column; raise if that would lose information."""
    if isinstance(value, str | bytes) and cell.varying:
        return value
    array: Array = numpy.asarray(value)
    fits = array.ndim == 1 if cell.varying else array.shape == cell.shape
    if not fits or (array.size and not numpy.can_cast(array.dtype, cell.dtype, "safe")):
        wanted = "flat" if cell.varying else f"of shape {cell.shape}"
        raise DataError(
            f"sample {number}: column {name} is {array.dtype} {array.shape} instead of {cell.dtype}, {wanted}",
            fix=f"convert it to the type and shape of the first samples, or, if lengths differ, pass varying=[{name!r}]",
        )
    return array.astype(cell.dtype)
