"""Lines, bands, error bars and marks as SVG paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.plot.line import Curve, Line
from paceline.plot.markup import Html, tag

SIZE = 1000  # width and height of a picture in its own units
_DOTS_UP_TO = 60  # points of a line
_CAP = 6  # half the width of the end of an error bar
_MARK = 45  # height of the mark of a checkpoint

ToPixels = Callable[[float], float]
Point = tuple[float, float]


@dataclass(frozen=True)
class Mark:
    """A moment of a run, marked in all its curves."""

    kind: Literal["restart", "checkpoint"]
    step: float
    time_s: float
    """Seconds since the first start."""
    color: int


def line_shapes(line: Line, x: ToPixels, y: ToPixels) -> list[Html]:
    """Return a line with its band or its error bars, and dots where its points are few."""
    parts = _unbroken(line.curve, x, y)
    shapes = []
    if line.curve.is_thinned:
        if line.error_bars:
            bars = _error_bars(line.curve, x, y)
            shapes.append(tag("path", class_=f"error c{line.color}", d=bars))
        else:
            shapes.append(tag("path", class_=f"band c{line.color}", d=_band(line.curve, x, y)))
    shapes.append(tag("path", class_=f"line {line_class(line)}", d=path(parts)))
    points = [point for part in parts for point in part]
    if len(points) <= _DOTS_UP_TO:
        dots = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in points)
        shapes.append(tag("path", class_=f"dots c{line.color}", d=dots))
    return shapes


def line_class(line: Line) -> str:
    """Return the class of a line and of its key."""
    return f"c{line.color}{' dashed' if line.dashed else ''}"


def mark_shapes(marks: Sequence[Mark], x: ToPixels) -> list[Html]:
    """Return a line from top to bottom for a restart, a short one at the bottom for a checkpoint."""
    places: dict[tuple[str, int, int], None] = {}
    for mark in marks:
        place = round(x(mark.step))
        if 0 <= place <= SIZE:
            places[mark.kind, mark.color, place] = None  # those that would overlap count once
    paths: dict[str, str] = {}
    for kind, color, place in places:
        shape = f"M{place} 0V{SIZE}" if kind == "restart" else f"M{place} {SIZE}v-{_MARK}"
        name = f"{kind} c{color}"
        paths[name] = paths.get(name, "") + shape
    return [tag("path", class_=name, d=shape) for name, shape in paths.items()]


def _unbroken(curve: Curve, x: ToPixels, y: ToPixels) -> list[list[Point]]:
    """Return the parts of a curve between values that are not finite."""
    parts: list[list[Point]] = [[]]
    for step, value in zip(curve.steps, curve.mean, strict=True):
        if value is None:
            parts.append([])
        else:
            parts[-1].append((x(step), y(value)))
    return [part for part in parts if part]


def path(parts: Sequence[Sequence[Point]]) -> str:
    """Return unbroken parts as the `d` attribute of an SVG path.

    >>> path([[(0, 0), (10.4, 20.6)], [(5, 5)]])
    'M0 0L10 21M5 5'
    """
    return "".join("M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in part) for part in parts)


def _ends(curve: Curve, x: ToPixels, y: ToPixels) -> list[tuple[float, float, float]]:
    """Return the place, the lowest and the highest value of each point."""
    ends = []
    for step, low, high in zip(curve.steps, curve.low, curve.high, strict=True):
        if low is not None and high is not None:
            ends.append((x(step), y(low), y(high)))
    return ends


def _band(curve: Curve, x: ToPixels, y: ToPixels) -> str:
    """Return the area between the lowest and the highest value of each column."""
    ends = _ends(curve, x, y)
    upper = [(place, high) for place, _, high in ends]
    lower = [(place, low) for place, low, _ in ends]
    return path([[*upper, *reversed(lower)]]) + "Z"


def _error_bars(curve: Curve, x: ToPixels, y: ToPixels) -> str:
    bars = []
    for place, low, high in _ends(curve, x, y):
        caps = [f"M{place - _CAP:.0f} {end:.0f}h{2 * _CAP}" for end in (low, high)]
        bars.append(f"M{place:.0f} {low:.0f}V{high:.0f}{''.join(caps)}")
    return "".join(bars)
