"""What every renderer draws: a named line, and the colors that lines have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LIGHT = ("#2f62b5", "#c4631a", "#2a8757", "#7d51b0", "#bd3f4a", "#1b8392", "#85791a", "#8b929b")
"""The palette on light paper; the last color is grey."""
DARK = ("#78a6ee", "#eb9a58", "#62c391", "#b491e2", "#ee7f88", "#56bccb", "#cdbf57", "#818993")
"""The same colors on dark paper."""

Number = float | None


@dataclass(frozen=True)
class Curve:
    """Points of a line in the order of x. A point without a finite value is None.

    A downsampled curve has the mean, the lowest and the highest value of each column.
    """

    steps: list[float]
    mean: list[Number]
    low: list[Number]
    high: list[Number]
    not_finite: int
    """The number of values that were infinite or NaN."""

    @classmethod
    def of(cls, x: Sequence[float], y: Iterable[float]) -> Curve:
        """Return a curve through points, none of which stands for several values."""
        values = list[Number](y)
        return cls(list(x), values, values, values, 0)

    @property
    def is_thinned(self) -> bool:
        """Whether a point stands for several values."""
        return self.low != self.high

    def as_dict(self) -> dict[str, Any]:
        """Return the lists by their JSON keys."""
        return vars(self)


@dataclass(frozen=True)
class Line:
    """One line of a chart and its entry in the legend."""

    name: str
    color: int
    """Its place in the palette."""
    curve: Curve
    dashed: bool = False
    error_bars: bool = False
    """Whether lowest and highest values are drawn as error bars, not as a band."""
    noisy: bool = False
    """Whether smoothing makes it easier to read."""
    clock: int = -1
    """The number of the clock that turns its steps into time and samples; -1: none."""


def css_colors(colors: Sequence[str]) -> str:
    """Return a palette as custom properties of CSS.

    >>> css_colors(["#fff", "#000"])
    '--c0: #fff; --c1: #000;'
    """
    return " ".join(f"--c{place}: {color};" for place, color in enumerate(colors))
