"""Curves as text: block characters for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_FULL = len(_BLOCKS) - 1
_STEEP = 20.0  # largest over smallest value, above which the axis is logarithmic
_LARGEST = 1e200  # larger values, infinities and NaN are not drawn


def text_curve(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Return the rows of a curve, the highest first; a column is the mean of its values.

    >>> text_curve([8, 4, 2, 1, 1, 1], 6), text_curve([1, 1], 8), text_curve([], 5)
    (['█▄▂▁▁▁'], ['▁▁'], [''])
    >>> text_curve([3, 2, 1], 3, height=2)
    ['█▁ ', '██▁']
    """
    finite = [value for value in values if abs(value) < _LARGEST]
    levels = _levels(column_means(finite, width), height)
    rows = []
    for row in reversed(range(height)):
        heights = (level - row * _FULL for level in levels)
        rows.append("".join(_BLOCKS[min(_FULL, max(0, height))] for height in heights))
    return rows


def column_means(values: Sequence[float], most: int) -> list[float]:
    """Return at most `most` values, each the mean of its neighbours.

    >>> column_means([1, 3, 5, 7], 2), column_means([1, 2], 5)
    ([2.0, 6.0], [1, 2])
    """
    count = len(values)
    if count <= most:
        return list(values)
    edges = [count * column // most for column in range(most + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]


def is_steep(values: Sequence[float]) -> bool:
    """Return whether values need a logarithmic axis: on a linear one they would soon be flat.

    >>> is_steep([20.0, 0.1]), is_steep([2.0, 1.0]), is_steep([20.0, 0.0])
    (True, False, False)
    """
    return min(values) > 0 and max(values) / min(values) > _STEEP


def _levels(values: list[float], height: int) -> list[int]:
    if not values:
        return []
    if is_steep(values):
        values = [math.log(value) for value in values]
    low, high = min(values), max(values)
    if high == low:
        return [1] * len(values)
    top = _FULL * height - 1
    return [1 + round(top * ((value - low) / (high - low))) for value in values]
