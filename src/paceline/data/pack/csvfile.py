"""Samples that are lines of CSV files: read once as texts into Parquet, and found to be numbers or not."""

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


def prepare_csv(request: PackRequest, files: Sequence[Path], shop: PackContext) -> Prepared:
    """Copy the columns that are wanted, file by file; a column is of numbers if its first cell is one."""
    there = _names(files[0])
    names = select_columns(there, request.columns, str(files[0]))
    kinds: dict[str, str] = {}
    groups: list[list[Any]] = []
    for number, path in enumerate(files):
        if _names(path) != there:
            raise DataError(
                f"{path} has columns {', '.join(_names(path))}, and the first file {', '.join(there)}",
                fix="pack those files apart",
            )
        copy = shop.spool / f"{number}.parquet"
        groups += [
            [str(copy.absolute()), group, rows]
            for group, rows in enumerate(_copied(path, copy, names, kinds))
        ]
    check_lengths(
        dict.fromkeys(names, sum(group[2] for group in groups)), ", ".join(map(str, files))
    )
    numbers = {name: kind for name, kind in kinds.items() if kind}
    return Prepared(Table(groups, names, numbers, str(files[0])))


def _copied(path: Path, copy: Path, names: Sequence[str], kinds: dict[str, str]) -> list[int]:
    """Copy a file, block by block; return the rows of each, and widen the kinds of columns as they turn out."""
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
    """Return the narrowest type that holds these cells and those before them: int64, double, or none for texts."""
    if kind is None:
        first = next((cell for cell in values.to_pylist() if cell.strip()), "")
        kind = "int64" if _is_number(first) else ""
    trimmed = import_optional("pyarrow.compute", "a CSV file").utf8_trim_whitespace(values)
    for wider in _AS_WIDE[kind]:
        with contextlib.suppress(ValueError):
            trimmed.cast(wider)
            return wider
    if kind:
        _refuse_texts(values, where, rows_before)
    return ""


def _refuse_texts(values: Any, where: str, rows_before: int) -> None:
    row, cell = next(
        (row, cell) for row, cell in enumerate(values.to_pylist(), 1) if not _is_number(cell)
    )
    said = repr(cell) if cell.strip() else "an empty cell"
    raise DataError(
        f"{where} is numbers, but {said} in row {rows_before + row:,}",
        fix="correct that cell, or leave the column out with --columns",
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
    if all(_is_number(name) for name in names) and names != [
        str(number) for number in range(len(names))
    ]:
        raise DataError(
            f"the first line of {path} has numbers, not names",
            fix="put a line with the names of the columns first",
        )
    if len(set(names)) < len(names):
        raise DataError(
            f"{path} has two columns {max(names, key=names.count)}",
            fix="give every column a name of its own",
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
