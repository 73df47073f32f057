"""How a million figures become a few hundred that show the same: mean, lowest and highest of every column of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

_LARGEST = 1e150  # what is larger, infinite or no number has no height

Number = float | None


@dataclass(frozen=True)
class Curve:
    """A thinned curve. Where nothing finite was told, there is no value."""

    steps: list[float]
    mean: list[Number]
    low: list[Number]
    high: list[Number]
    not_finite: int
    """How many values were infinite or no number."""

    @property
    def is_thinned(self) -> bool:
        """Whether a point stands for several values."""
        return self.low != self.high

    def facts(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return vars(self)


def downsample(steps: Sequence[float], values: Sequence[float], columns: int) -> Curve:
    """Return at most so many points, evenly spread; each is the last step of its column.

    >>> downsample([1, 2, 3, 4], [8, 2, 3, float("nan")], 2)
    Curve(steps=[2.0, 4.0], mean=[5.0, 3.0], low=[2.0, 3.0], high=[8.0, 3.0], not_finite=1)
    """
    x, y = numpy.asarray(steps, dtype=float), numpy.asarray(values, dtype=float)
    known = numpy.isfinite(x)
    x, y = x[known], y[known]
    if not x.size:
        return Curve([], [], [], [], 0)
    order = numpy.argsort(x, kind="stable")
    x, y = x[order], y[order]
    good = numpy.abs(y) < _LARGEST
    first = _first_of_columns(x, columns)
    count = numpy.add.reduceat(good, first, dtype=float)
    with numpy.errstate(invalid="ignore", divide="ignore"):
        mean = numpy.add.reduceat(numpy.where(good, y, 0.0), first) / count
    low = numpy.minimum.reduceat(numpy.where(good, y, numpy.inf), first)
    high = numpy.maximum.reduceat(numpy.where(good, y, -numpy.inf), first)
    last = numpy.append(first[1:], x.size) - 1
    return Curve(
        x[last].tolist(), _rounded(mean), _rounded(low), _rounded(high), int((~good).sum())
    )


def _first_of_columns(
    x: numpy.typing.NDArray[numpy.float64], columns: int
) -> numpy.typing.NDArray[numpy.int64]:
    """Return the places at which columns begin."""
    if x.size <= columns or x[-1] == x[0]:
        return numpy.arange(x.size) if x.size <= columns else numpy.zeros(1, dtype=numpy.int64)
    column = numpy.minimum((x - x[0]) / (x[-1] - x[0]) * columns, columns - 1).astype(numpy.int64)
    return numpy.flatnonzero(numpy.diff(column, prepend=-1))


def _rounded(values: numpy.typing.NDArray[numpy.float64]) -> list[Number]:
    """Return numbers of six digits: more cannot be seen."""
    return [float(f"{value:.6g}") if abs(value) < _LARGEST else None for value in values.tolist()]
