"""Select the columns of an input, and check that a shard can store them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from paceline.data.shards.index import Column, DatasetIndex, ShardFacts
from paceline.data.shards.shard import Rows, column_of
from paceline.dtypes import SAFETENSORS_NAMES
from paceline.errors import ConfigError, DataError, did_you_mean

_PARTS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "val": "validation",
    "valid": "validation", "validation": "validation", "dev": "validation", "eval": "test",
}  # fmt: skip
"""Words in the names of columns, and the part of the data that they mean."""
_LABELS = {"label", "labels", "target", "targets", "class", "y"}


def select_columns(available: Sequence[str], wanted: Sequence[str], where: str) -> list[str]:
    """Return the wanted columns in that order; by default all columns, labels last.

    >>> select_columns(["label", "pixels"], [], "x.npz")
    ['pixels', 'label']
    >>> select_columns(["a", "b", "c"], ["c", "a"], "x.npz")
    ['c', 'a']
    """
    for name in wanted:
        if name not in available:
            raise ConfigError(f"{where} has no column {name}", fix=did_you_mean(name, available))
    if len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"--columns {','.join(wanted)} names a column twice", fix="name each column once"
        )
    if wanted:
        return list(wanted)
    return sorted(available, key=lambda name: name.rpartition("/")[2].lower() in _LABELS)


def refuse_parts(names: Sequence[str], where: str) -> None:
    """Raise if columns belong to the training part and to another: their rows are not the same samples.

    >>> refuse_parts(["train/images", "train/labels", "constraints"], "x.h5")
    >>> refuse_parts(["x_train", "x_test"], "x.h5")
    Traceback (most recent call last):
    paceline.errors.ConfigError: x.h5 has columns of several parts: train (x_train), test (x_test); their rows are not the same samples
      fix: choose those of one part: columns=["x_train"], or `paceline data pack --columns x_train`
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        words = re.split(r"[^a-z0-9]+", name.lower())
        part = next((_PARTS[word] for word in words if word in _PARTS), "")
        parts.setdefault(part, []).append(name)
    parts.pop("", None)
    if "train" not in parts or len(parts) < 2:
        return
    ordered = sorted(parts, key=lambda part: part != "train")
    listed = ", ".join(f"{part} ({', '.join(parts[part])})" for part in ordered)
    first = parts["train"]
    raise ConfigError(
        f"{where} has columns of several parts: {listed}; their rows are not the same samples",
        fix=f"choose those of one part: columns={json.dumps(first)}, or `paceline data pack --columns {','.join(first)}`",
    )


def check_lengths(lengths: Mapping[str, int], where: str) -> int:
    """Return the number of samples; raise unless all columns have the same length, above 0."""
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise DataError(
            f"{where}: columns of different lengths: {listed}",
            fix="select columns of equal length with --columns",
        )
    samples = next(iter(lengths.values()), 0)
    if not samples:
        raise DataError(f"{where} contains no samples", fix="name an input that is not empty")
    return samples


def storable_dtype(dtype: numpy.dtype[Any], name: str, where: str) -> numpy.dtype[Any]:
    """Return a dtype in little-endian order; raise if a shard cannot store it."""
    if dtype.hasobject:
        raise DataError(
            f"{where}: {name} contains Python objects, which are never unpickled",
            fix="save it as an array of numbers (rows of different lengths and None make object arrays)",
        )
    if dtype.name not in SAFETENSORS_NAMES:
        raise DataError(
            f"{where}: {name} has type {dtype}, which a shard cannot store",
            fix=f"convert it to one of: {', '.join(SAFETENSORS_NAMES)}",
        )
    return dtype.newbyteorder("<")


def columns_of(rows: Rows) -> tuple[Column, ...]:
    """Return the columns of some samples; raise if an index cannot describe them."""
    columns = tuple(column_of(name, values) for name, values in rows.items())
    draft = DatasetIndex(columns, 1, (ShardFacts("00000.safetensors", 1, 0, 0, "", ""),))
    DatasetIndex.from_json(draft.to_json(), f"a dataset of columns {', '.join(rows)}")
    return columns
