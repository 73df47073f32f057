"""Flatten samples of different lengths to one array with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from paceline.data.shards.shard import Varying


def make_varying(values: Sequence[Any], dtype: numpy.dtype[Any]) -> Varying:
    """Return strings, bytes or flat arrays as one flat array with offsets.

    >>> make_varying(["ab", b"", "é"], numpy.dtype("u1"))
    Varying(flat=array([ 97,  98, 195, 169], dtype=uint8), offsets=array([0, 2, 2, 4]))
    """
    flat = [_flat(value, dtype) for value in values]
    offsets = numpy.zeros(len(flat) + 1, dtype=numpy.int64)
    numpy.cumsum(list(map(len, flat)), out=offsets[1:])
    return Varying(numpy.concatenate([numpy.empty(0, dtype), *flat], dtype=dtype), offsets)


def _flat(value: Any, dtype: numpy.dtype[Any]) -> Any:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return numpy.frombuffer(value, dtype="u1")
    return numpy.asarray(value, dtype).reshape(-1)
