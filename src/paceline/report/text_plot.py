"""How a curve is drawn with letters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_FULL = len(_BLOCKS) - 1
_STEEP = 20.0  # above this ratio of largest to smallest the heights are logarithms

_LARGEST = 1e200  # what is larger, infinite or no number has no height


def curve(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Return the rows of a curve, the highest first; a column is the mean of what falls into it.

    >>> curve([8, 4, 2, 1, 1, 1], 6), curve([1, 1], 8), curve([], 5)
    (['█▄▂▁▁▁'], ['▁▁'], [''])
    >>> curve([3, 2, 1], 3, height=2)
    ['█▁ ', '██▁']
    """
    columns = _heights(thinned([value for value in values if abs(value) < _LARGEST], width), height)
    rows = range(height - 1, -1, -1)
    return [
        "".join(_BLOCKS[min(_FULL, max(0, level - row * _FULL))] for level in columns)
        for row in rows
    ]


def thinned(values: Sequence[float], most: int) -> list[float]:
    """Return at most so many values, each the mean of its neighbours.

    >>> thinned([1, 3, 5, 7], 2), thinned([1, 2], 5)
    ([2.0, 6.0], [1, 2])
    """
    count = len(values)
    if count <= most:
        return list(values)
    cuts = [count * column // most for column in range(most + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(cuts)]


def is_steep(values: Sequence[float]) -> bool:
    """Return whether a curve of these values is drawn on a logarithmic scale: else it would soon be a flat line.

    >>> is_steep([20.0, 0.1]), is_steep([2.0, 1.0]), is_steep([20.0, 0.0])
    (True, False, False)
    """
    return min(values) > 0 and max(values) / min(values) > _STEEP


def _heights(values: list[float], height: int) -> list[int]:
    if not values:
        return []
    if is_steep(values):
        values = [math.log(value) for value in values]
    low, high = min(values), max(values)
    top = _FULL * height - 1
    return [
        1 + round(top * ((value - low) / (high - low))) if high > low else 1 for value in values
    ]
