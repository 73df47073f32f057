"""Charts within an HTML page: the SVG stretches with the page, the text beside it keeps its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.plot.line import Curve, Line
from paceline.plot.markup import NOTHING, Html, tag
from paceline.plot.text import is_steep
from paceline.plot.ticks import label, linear_ticks, log_ticks, span

SIZE = 1000  # width and height of a picture in its own units
_DOTS_UP_TO = 60  # points of a line
_LABELS_UP_TO = 6  # points that are all labelled
_WORTH_A_LOG = 2.0  # largest over smallest value

ToPixels = Callable[[float], float]
Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """A vertical axis, linear or logarithmic."""

    kind: str
    low: float
    high: float
    ticks: list[float]

    def y(self, value: float) -> float:
        """Return the height of a value, from 0 at the top to SIZE at the bottom."""
        low, high = self.low, self.high
        if self.kind == "log":
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return SIZE * (1 - (value - low) / (high - low))


class Charts:
    """All charts of a page, and the data that its script needs for them."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def keep(self, data: dict[str, Any]) -> int:
        """Keep the data of a picture for the script; return its number."""
        self.data.append(data)
        return len(self.data) - 1

    def add(
        self,
        title: str,
        unit: str,
        lines: Sequence[Line],
        note: str = "",
        *,
        first: bool = False,
        axis: str = "step",
    ) -> Html:
        """Return a chart, or nothing without values. The first one of a page is wide, and logarithmic if it is steep."""
        drawn = [line for line in lines if any(value is not None for value in line.curve.mean)]
        if not drawn:
            return NOTHING
        scales, steep = _scales(drawn)
        left, right = _x_range(drawn)
        number = self.keep(
            {
                "x": [left, right],
                "scales": {scale.kind: [scale.low, scale.high] for scale in scales},
                "lines": [_line_data(line) for line in drawn],
                "axis": axis,
            }
        )
        pick, switch = _log_switch(number, on=steep and first) if len(scales) > 1 else ("", "")
        unit_ = tag("span", unit, class_="unit")
        head = tag("figcaption", tag("h3", title), unit_, _legend(drawn), switch)
        plots = [_plot(drawn, scale, (left, right), number, title) for scale in scales]
        below = tag("p", note, class_="note") if note else NOTHING
        return tag("figure", pick, head, *plots, below, class_="chart wide" if first else "chart")


def picture(name: str, *shapes: Html) -> Html:
    """Return shapes as an SVG element that stretches to the size of its parent."""
    return tag(
        "svg", *shapes,
        viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", role="img", aria_label=name,
    )  # fmt: skip


def axis_label(axis: str, place: float, text: str) -> Html:
    """Return the text at a tick of an axis."""
    side = "left" if axis == "x" else "top"
    return tag("span", text, class_=axis, style=f"{side}:{place / SIZE:.2%}")


def key(color: str, text: str) -> Html:
    """Return an entry of a legend."""
    return tag("span", tag("i", class_=f"key {color}"), text, class_="entry")


def _log_switch(number: int, *, on: bool) -> tuple[Html, Html]:
    checked: dict[str, str] = {"checked": ""} if on else {}
    name = f"log-{number}"
    pick = tag("input", type="checkbox", id=name, class_="pick", **checked)
    return pick, tag("label", "log", for_=name, class_="switch")


def _scales(lines: Sequence[Line]) -> tuple[list[Scale], bool]:
    """Return a linear scale, a logarithmic one if it makes sense, and whether the latter shows more."""
    values = []
    for line in lines:
        ends = [*line.curve.low, *line.curve.high]
        values += [value for value in ends if value is not None]
    low, high = span(values)
    linear = Scale("linear", low, high, linear_ticks(low, high))
    if min(values) <= 0 or max(values) < _WORTH_A_LOG * min(values):
        return [linear], False
    low, high = min(values) / 1.05, max(values) * 1.05
    return [linear, Scale("log", low, high, log_ticks(low, high))], is_steep(values)


def _x_range(lines: Sequence[Line]) -> tuple[float, float]:
    left = min(line.curve.steps[0] for line in lines)
    right = max(line.curve.steps[-1] for line in lines)
    return (left, right) if right > left else (left - 1, right + 1)


def _line_data(line: Line) -> dict[str, Any]:
    curve = line.curve
    data = {"name": line.name, "color": line.color, "x": curve.steps, "y": curve.mean}
    return data | ({"low": curve.low, "high": curve.high} if curve.is_thinned else {})


def _legend(lines: Sequence[Line]) -> Html:
    if len(lines) < 2:
        return NOTHING
    return tag("span", *(key(_class(line), line.name) for line in lines), class_="legend")


def _class(line: Line) -> str:
    return f"c{line.color}{' dashed' if line.dashed else ''}"


def _plot(
    lines: Sequence[Line], scale: Scale, x_range: tuple[float, float], number: int, title: str
) -> Html:
    left, right = x_range

    def x(step: float) -> float:
        return SIZE * (step - left) / (right - left)

    grid = "".join(f"M0 {scale.y(value):.0f}H{SIZE}" for value in scale.ticks)
    shapes = [tag("path", class_="grid", d=grid)]
    for line in lines:
        shapes += _shapes(line, x, scale.y)
    drawn = picture(f"{title}, {scale.kind} scale", *shapes)
    beside = [axis_label("y", scale.y(value), label(value)) for value in scale.ticks]
    below = [axis_label("x", x(value), label(value)) for value in _x_ticks(lines, left, right)]
    area = tag(
        "div", drawn, *beside, *below, class_="area", data_chart=number, data_scale=scale.kind
    )
    return tag("div", area, class_=f"plot {scale.kind}")


def _x_ticks(lines: Sequence[Line], left: float, right: float) -> list[float]:
    """Return the points themselves if they are few, as world sizes are; else round numbers."""
    points = sorted({step for line in lines for step in line.curve.steps})
    if len(points) <= _LABELS_UP_TO:
        least = (right - left) / 12  # labels nearer than this would overlap
        if all(later - sooner > least for sooner, later in pairwise(points)):
            return points
    return [value for value in linear_ticks(left, right) if value.is_integer()]


def _shapes(line: Line, x: ToPixels, y: ToPixels) -> list[Html]:
    parts = _unbroken(line.curve, x, y)
    shapes = []
    if line.curve.is_thinned:
        shapes.append(tag("path", class_=f"band c{line.color}", d=_band(line.curve, x, y)))
    shapes.append(tag("path", class_=f"line {_class(line)}", d=path(parts)))
    points = [point for part in parts for point in part]
    if len(points) <= _DOTS_UP_TO:
        dots = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in points)
        shapes.append(tag("path", class_=f"dots c{line.color}", d=dots))
    return shapes


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


def _band(curve: Curve, x: ToPixels, y: ToPixels) -> str:
    """Return the area between the lowest and the highest value of each column."""
    upper, lower = [], []
    for step, low, high in zip(curve.steps, curve.low, curve.high, strict=True):
        if low is not None and high is not None:
            upper.append((x(step), y(high)))
            lower.append((x(step), y(low)))
    return path([[*upper, *reversed(lower)]]) + "Z"
