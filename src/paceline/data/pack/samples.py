"""How samples that a program makes one by one become a set."""

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

_TRIED = 64
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
    """Write samples, each a mapping from column to array, number, text or bytes, as a set; return its index.

    The first sample says the columns and their order. Texts and bytes may have any length; so may flat arrays of a
    column that is named in `varying`, or whose first samples differ in length.
    """
    rest, folder, known = iter(samples), Path(folder), _plain(about or {})
    first = list(itertools.islice(rest, _TRIED))
    if not first:
        raise ConfigError("there are no samples to pack", fix="give at least one")
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
        index = DatasetIndex(columns, each, tuple(journal.finished.values()), known)
        write_whole(folder / INDEX, index.to_json())
        journal.end()
    return index


def _plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an index will say once it was written and read."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(about))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"about= cannot be written as JSON: {error}", fix="give texts, numbers, lists and dicts"
        ) from error
    return found


def _was_interrupted(folder: Path) -> bool:
    """Return whether a folder has what is left of such a pack: it begins again, for a program may give other samples."""
    return not (folder / INDEX).exists() and "".join(plan_in(folder)[:1]).startswith(_PLAN)


def _batches(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    while batch := list(itertools.islice(samples, size)):
        yield batch


class _Cell(NamedTuple):
    """What every sample has in a column."""

    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    varying: bool


def _cell(name: str, values: Sequence[Any], varying: bool) -> _Cell:  # noqa: FBT001 - it says which
    """Return what the first values of a column are."""
    if all(isinstance(value, str | bytes) for value in values):
        return _Cell(numpy.dtype("u1"), (), varying=True)
    arrays = [numpy.asarray(value) for value in values]
    told = [array for array in arrays if array.size] or arrays  # an empty list is of no type
    dtype = storable_dtype(numpy.result_type(*told), name, "the first samples")
    shapes = {array.shape for array in arrays}
    if varying or (len(shapes) > 1 and all(len(shape) == 1 for shape in shapes)):
        return _Cell(dtype, (), varying=True)
    return _Cell(dtype, arrays[0].shape, varying=False)


def _rows(samples: Sequence[Sample], cells: Mapping[str, _Cell], begin: int) -> Rows:
    """Return samples as columns."""
    found: dict[str, Any] = {}
    for name, cell in cells.items():
        values = [
            _checked(_value(sample, name, begin + k), name, cell, begin + k)
            for k, sample in enumerate(samples)
        ]
        found[name] = make_varying(values, cell.dtype) if cell.varying else numpy.stack(values)
    for number, sample in enumerate(samples):
        if len(sample) != len(cells):
            raise DataError(
                f"sample {begin + number} has columns {', '.join(sample)}, and the first {', '.join(cells)}",
                fix="give every sample the same columns",
            )
    return found


def _value(sample: Sample, name: str, number: int) -> Any:
    try:
        return sample[name]
    except KeyError as error:
        raise DataError(
            f"sample {number} has no column {name}", fix="give every sample the same columns"
        ) from error


def _checked(value: Any, name: str, cell: _Cell, number: int) -> Any:
    """Return a value as the column has it, if nothing of it is lost."""
    if isinstance(value, str | bytes) and cell.varying:
        return value
    array: Array = numpy.asarray(value)
    alike = array.ndim == 1 if cell.varying else array.shape == cell.shape
    if not alike or (array.size and not numpy.can_cast(array.dtype, cell.dtype, "safe")):
        wanted = "flat" if cell.varying else f"of shape {cell.shape}"
        raise DataError(
            f"sample {number}: column {name} is {array.dtype} {array.shape}, and should be {cell.dtype}, {wanted}",
            fix=f"make it like the first ones, or, if lengths differ, give varying=[{name!r}]",
        )
    return array.astype(cell.dtype)
