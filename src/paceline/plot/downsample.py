"""Downsampling: a million values become a few hundred columns with mean, lowest and highest value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from paceline.plot.line import Curve, Number

_LARGEST = 1e150  # larger values, infinities and NaN are not drawn


def downsample(steps: Sequence[float], values: Sequence[float], columns: int) -> Curve:
    """Return a curve of at most `columns` evenly spread points, each at the last step of its column.

    >>> downsample([1, 2, 3, 4], [8, 2, 3, float("nan")], 2)
    Curve(steps=[2.0, 4.0], mean=[5.0, 3.0], low=[2.0, 3.0], high=[8.0, 3.0], not_finite=1)
    """
    x, y = numpy.asarray(steps, dtype=float), numpy.asarray(values, dtype=float)
    has_step = numpy.isfinite(x)
    x, y = x[has_step], y[has_step]
    if not x.size:
        return Curve([], [], [], [], 0)
    order = numpy.argsort(x, kind="stable")
    x, y = x[order], y[order]
    good = numpy.abs(y) < _LARGEST
    first = _column_starts(x, columns)
    count = numpy.add.reduceat(good, first, dtype=float)
    with numpy.errstate(invalid="ignore", divide="ignore"):
        mean = numpy.add.reduceat(numpy.where(good, y, 0.0), first) / count
    low = numpy.minimum.reduceat(numpy.where(good, y, numpy.inf), first)
    high = numpy.maximum.reduceat(numpy.where(good, y, -numpy.inf), first)
    last = numpy.append(first[1:], x.size) - 1
    not_finite = int((~good).sum())
    return Curve(x[last].tolist(), _rounded(mean), _rounded(low), _rounded(high), not_finite)


def _column_starts(
    x: numpy.typing.NDArray[numpy.float64], columns: int
) -> numpy.typing.NDArray[numpy.int64]:
    if x.size <= columns:
        return numpy.arange(x.size)
    if x[-1] == x[0]:
        return numpy.zeros(1, dtype=numpy.int64)
    share = (x - x[0]) / (x[-1] - x[0])
    column = numpy.minimum(share * columns, columns - 1).astype(numpy.int64)
    return numpy.flatnonzero(numpy.diff(column, prepend=-1))


def _rounded(values: numpy.typing.NDArray[numpy.float64]) -> list[Number]:
    """Return six significant digits: a screen shows no more."""
    return [float(f"{value:.6g}") if abs(value) < _LARGEST else None for value in values.tolist()]
