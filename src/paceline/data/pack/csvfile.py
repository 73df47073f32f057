"""Pack rows of CSV files: converted once to Parquet as text, while the numeric columns are detected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.data.pack.columns import check_lengths, select_columns
from paceline.data.pack.inputs import PackContext, Prepared
from paceline.data.pack.optional_packages import import_optional
from paceline.data.pack.request import PackRequest
from paceline.data.pack.tables import Table
from paceline.errors import DataError

SUFFIXES = (".csv", ".tsv")
_BLOCK_BYTES = 1 << 22
_AS_WIDE = {"int64": ("int64", "double"), "double": ("double",), "": ()}


def prepare_csv(request: PackRequest, files: Sequence[Path], context: PackContext) -> Prepared:
    """Copy the selected columns to Parquet; a column is numeric if its first cell is a number."""
    available = _names(files[0])
    names = select_columns(available, request.columns, str(files[0]))
    kinds: dict[str, str] = {}
    groups: list[list[Any]] = []
    for number, path in enumerate(files):
        if _names(path) != available:
            raise DataError(
                f"{path} has columns {', '.join(_names(path))}, the first file {', '.join(available)}",
                fix="pack these files separately",
            )
        copy = context.spool / f"{number}.parquet"
        row_counts = _copy_to_parquet(path, copy, names, kinds)
        groups += [[str(copy.absolute()), group, rows] for group, rows in enumerate(row_counts)]
    check_lengths(
        dict.fromkeys(names, sum(group[2] for group in groups)), ", ".join(map(str, files))
    )
    numbers = {name: kind for name, kind in kinds.items() if kind}
    return Prepared(Table(groups, names, numbers, str(files[0])))


def _copy_to_parquet(
    path: Path, copy: Path, names: Sequence[str], kinds: dict[str, str]
) -> list[int]:
    """Copy a file in blocks.

    Return the rows per block, and widen `kinds` to the types that occur.
    """
    pyarrow, parquet = (
        import_optional("pyarrow", "a CSV file"),
        import_optional("pyarrow.parquet", "a CSV file"),
    )
    schema = pyarrow.schema([(name, pyarrow.string()) for name in names])
    rows: list[int] = []
    with parquet.ParquetWriter(copy, schema) as writer:
        for block in _blocks(path, names):
            for name in names:
                kinds[name] = _kind(
                    block.column(name), kinds.get(name), f"{path}: {name}", sum(rows)
                )
            writer.write_batch(block)
            rows.append(block.num_rows)
    return rows


def _kind(values: Any, kind: str | None, where: str, rows_before: int) -> str:
    """Return the narrowest type of these cells and earlier ones: int64, double, or an empty string for text."""
    if kind is None:
        first = next((cell for cell in values.to_pylist() if cell.strip()), "")
        kind = "int64" if _is_number(first) else ""
    trimmed = import_optional("pyarrow.compute", "a CSV file").utf8_trim_whitespace(values)
    for wider in _AS_WIDE[kind]:
        with contextlib.suppress(ValueError):
            trimmed.cast(wider)
            return wider
    if kind:
        _refuse_text(values, where, rows_before)
    return ""


def _refuse_text(values: Any, where: str, rows_before: int) -> None:
    row, cell = next(
        (row, cell) for row, cell in enumerate(values.to_pylist(), 1) if not _is_number(cell)
    )
    shown = repr(cell) if cell.strip() else "an empty cell"
    raise DataError(
        f"{where} is numeric, but row {rows_before + row:,} has {shown}",
        fix="correct that cell, or select other columns with --columns",
    )


def _is_number(cell: str) -> bool:
    pyarrow = import_optional("pyarrow", "a CSV file")
    try:
        pyarrow.scalar(cell.strip()).cast("double")
    except ValueError:
        return False
    return True


def _names(path: Path) -> list[str]:
    names: list[str] = _reader(path, {}).schema.names
    numbered = list(map(str, range(len(names))))
    if names != numbered and all(map(_is_number, names)):
        raise DataError(
            f"the first line of {path} contains numbers, not column names",
            fix="add a first line with the names of the columns",
        )
    if len(set(names)) < len(names):
        raise DataError(
            f"{path} has two columns named {max(names, key=names.count)}",
            fix="give every column a unique name",
        )
    return names


def _blocks(path: Path, names: Sequence[str]) -> Iterator[Any]:
    text = import_optional("pyarrow", "a CSV file").string()
    reader = _reader(path, dict.fromkeys(names, text))
    try:
        yield from (block for block in reader if block.num_rows)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _reader(path: Path, types: dict[str, Any]) -> Any:
    csv = import_optional("pyarrow.csv", "a CSV file")
    convert = csv.ConvertOptions(column_types=types, include_columns=list(types))
    parse = csv.ParseOptions(
        delimiter="\t" if path.suffix == ".tsv" else ",", newlines_in_values=True
    )
    try:
        return csv.open_csv(
            path, csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES), parse, convert
        )
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"cannot read {path} as CSV: {error}", fix="correct that line, or name another file"
    )
