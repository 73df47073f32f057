"""Which columns an input gives, in which order, and whether a shard can hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from paceline.data.shards.index import Column, DatasetIndex, ShardFacts
from paceline.data.shards.shard import Rows, column_of
from paceline.dtypes import SAFETENSORS_NAMES
from paceline.errors import ConfigError, DataError, did_you_mean

_LABELS = {"label", "labels", "target", "targets", "class", "y"}


def select_columns(there: Sequence[str], wanted: Sequence[str], where: str) -> list[str]:
    """Return the columns that are wanted, in that order; all of them, what is called a label last, if none is named.

    >>> select_columns(["label", "pixels"], [], "x.npz"), select_columns(["a", "b", "c"], ["c", "a"], "x.npz")
    (['pixels', 'label'], ['c', 'a'])
    """
    for name in wanted:
        if name not in there:
            raise ConfigError(f"{where} has no column {name}", fix=did_you_mean(name, there))
    if len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"--columns {','.join(wanted)} names a column twice", fix="name each once"
        )
    return list(wanted) or sorted(
        there, key=lambda name: name.rpartition("/")[2].lower() in _LABELS
    )


def check_lengths(lengths: Mapping[str, int], where: str) -> int:
    """Return how many samples there are, if every column has as many."""
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise DataError(
            f"{where}: columns of different lengths: {said}",
            fix="choose those of equal length with --columns",
        )
    samples = next(iter(lengths.values()), 0)
    if not samples:
        raise DataError(f"{where} holds no samples", fix="name an input that is not empty")
    return samples


def storable_dtype(dtype: numpy.dtype[Any], name: str, where: str) -> numpy.dtype[Any]:
    """Return a type as a shard holds it, little end first, if it does."""
    if dtype.hasobject:
        raise DataError(
            f"{where}: {name} holds Python objects, which are never unpickled",
            fix="save it as an array of numbers (object arrays come of rows of different lengths, or of None)",
        )
    if dtype.name not in SAFETENSORS_NAMES:
        raise DataError(
            f"{where}: {name} is of type {dtype}, which a shard cannot hold",
            fix=f"make it one of: {', '.join(SAFETENSORS_NAMES)}",
        )
    return dtype.newbyteorder("<")


def columns_of(rows: Rows) -> tuple[Column, ...]:
    """Return the columns that some samples have, if an index can name them."""
    columns = tuple(column_of(name, values) for name, values in rows.items())
    draft = DatasetIndex(columns, 1, (ShardFacts("00000.safetensors", 1, 0, 0, "", ""),))
    DatasetIndex.from_json(draft.to_json(), f"a set of columns {', '.join(rows)}")
    return columns
