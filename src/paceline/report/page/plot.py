"""Curves as SVG that stretches with the page: shapes are drawn by it, letters stand beside it and keep their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.report.page.downsample import Curve, Number
from paceline.report.page.markup import Html, tag
from paceline.report.page.ticks import label, linear_ticks, log_ticks, span
from paceline.report.text_plot import is_steep

SIZE = 1000  # of a picture, both ways, in its own units
_DOTTED = 60  # points; fewer are drawn as dots as well
_FEW = 6
_WORTH_A_LOG = 2.0  # largest over smallest value

Place = Callable[[float], float]


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    color: int
    curve: Curve
    dashed: bool = False


@dataclass(frozen=True)
class Scale:
    """A vertical scale: which values it shows, and how."""

    kind: str
    low: float
    high: float
    ticks: list[float]

    def place(self, value: float) -> float:
        """Return where a value stands, from 0 at the top to SIZE at the bottom."""
        if self.kind == "log":
            value, low, high = math.log10(value), math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return SIZE * (1 - (value - low) / (high - low))


class Charts:
    """All charts of a page, and what hovering over them needs to know."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def keep(self, known: dict[str, Any]) -> int:
        """Keep what the script needs to know of a picture; return its number."""
        self.data.append(known)
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
        """Return a chart; nothing if there is nothing to draw. The first one is wide, and logarithmic where it is steep."""
        drawn = [line for line in lines if any(value is not None for value in line.curve.mean)]
        if not drawn:
            return Html("")
        scales, steep = _scales(drawn)
        left, right = _reach(drawn)
        known = [_known(line) for line in drawn]
        limits = {scale.kind: [scale.low, scale.high] for scale in scales}
        number = self.keep({"x": [left, right], "scales": limits, "lines": known, "axis": axis})
        name = f"log-{number}"
        checked: dict[str, str] = {"checked": ""} if steep and first else {}
        pick = (
            tag("input", type="checkbox", id=name, class_="pick", **checked)
            if len(scales) > 1
            else Html("")
        )
        switch = tag("label", "log", for_=name, class_="switch") if len(scales) > 1 else Html("")
        head = tag(
            "figcaption", tag("h3", title), tag("span", unit, class_="unit"), _legend(drawn), switch
        )
        plots = [_plot(drawn, scale, left, right, number, title) for scale in scales]
        below = tag("p", note, class_="note") if note else Html("")
        return tag("figure", pick, head, *plots, below, class_="chart wide" if first else "chart")


def _scales(lines: Sequence[Line]) -> tuple[list[Scale], bool]:
    """Return a linear scale, and a logarithmic one where that can be; and whether the latter shows more."""
    values = [
        value
        for line in lines
        for value in [*line.curve.low, *line.curve.high]
        if value is not None
    ]
    low, high = span(values)
    linear = Scale("linear", low, high, linear_ticks(low, high))
    if min(values) <= 0 or max(values) < _WORTH_A_LOG * min(values):
        return [linear], False
    low, high = min(values) / 1.05, max(values) * 1.05
    return [linear, Scale("log", low, high, log_ticks(low, high))], is_steep(values)


def _reach(lines: Sequence[Line]) -> tuple[float, float]:
    left = min(line.curve.steps[0] for line in lines)
    right = max(line.curve.steps[-1] for line in lines)
    return (left, right) if right > left else (left - 1, right + 1)


def _known(line: Line) -> dict[str, Any]:
    band = {"low": line.curve.low, "high": line.curve.high} if line.curve.is_thinned else {}
    return {
        "name": line.name,
        "color": line.color,
        "x": line.curve.steps,
        "y": line.curve.mean,
    } | band


def _legend(lines: Sequence[Line]) -> Html:
    """Return which line is which, where there are several."""
    if len(lines) < 2:
        return Html("")
    keys = [
        tag(
            "span",
            tag("i", class_=f"key c{line.color}{' dashed' if line.dashed else ''}"),
            line.name,
            class_="entry",
        )
        for line in lines
    ]
    return tag("span", *keys, class_="legend")


def _plot(
    lines: Sequence[Line], scale: Scale, left: float, right: float, number: int, title: str
) -> Html:
    def across(step: float) -> float:
        return SIZE * (step - left) / (right - left)

    grid = "".join(f"M0 {scale.place(value):.0f}H{SIZE}" for value in scale.ticks)
    shapes = [shape for line in lines for shape in _shapes(line, across, scale.place)]
    picture = tag(
        "svg", tag("path", class_="grid", d=grid), *shapes,
        viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", role="img", aria_label=f"{title}, {scale.kind} scale",
    )  # fmt: skip
    beside = [axis_label("y", scale.place(value), label(value)) for value in scale.ticks]
    below = [axis_label("x", across(value), label(value)) for value in _marks(lines, left, right)]
    area = tag(
        "div", picture, *beside, *below, class_="area", data_chart=number, data_scale=scale.kind
    )
    return tag("div", area, class_=f"plot {scale.kind}")


def _marks(lines: Sequence[Line], left: float, right: float) -> list[float]:
    """Return what is written below: the points themselves where they are few, as sizes of a world are; else round numbers."""
    points = sorted({step for line in lines for step in line.curve.steps})
    apart = len(points) <= _FEW and all(
        later - sooner > (right - left) / 12 for sooner, later in pairwise(points)
    )
    return points if apart else [value for value in linear_ticks(left, right) if value.is_integer()]


def axis_label(axis: str, place: float, words: str) -> Html:
    """Return what is written at a line of a scale."""
    side = "left" if axis == "x" else "top"
    return tag("span", words, class_=axis, style=f"{side}:{place / SIZE:.2%}")


def _shapes(line: Line, across: Place, up: Place) -> list[Html]:
    curve, kind = line.curve, f"c{line.color}"
    points = [
        (across(step), up(value))
        for step, value in zip(curve.steps, curve.mean, strict=True)
        if value is not None
    ]
    found = (
        [tag("path", class_=f"band {kind}", d=_band(curve, across, up))] if curve.is_thinned else []
    )
    found.append(
        tag(
            "path",
            class_=f"line {kind}{' dashed' if line.dashed else ''}",
            d=path(_gaps(curve, across, up)),
        )
    )
    if len(points) <= _DOTTED:
        found.append(
            tag("path", class_=f"dots {kind}", d="".join(f"M{x:.0f} {y:.0f}h0" for x, y in points))
        )
    return found


def _gaps(curve: Curve, across: Place, up: Place) -> list[list[tuple[float, float]]]:
    """Return the stretches of a curve between values that are none."""
    parts: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(curve.steps, curve.mean, strict=True):
        if value is None:
            parts.append([])
        else:
            parts[-1].append((across(step), up(value)))
    return [part for part in parts if part]


def path(parts: Sequence[Sequence[tuple[float, float]]]) -> str:
    """Return stretches of points as the word of an SVG path.

    >>> path([[(0, 0), (10.4, 20.6)], [(5, 5)]])
    'M0 0L10 21M5 5'
    """
    return "".join("M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in part) for part in parts)


def _band(curve: Curve, across: Place, up: Place) -> str:
    """Return the room between the lowest and the highest value of each column."""
    columns: list[tuple[float, Number, Number]] = list(
        zip(curve.steps, curve.low, curve.high, strict=True)
    )
    whole = [
        (across(step), up(low), up(high))
        for step, low, high in columns
        if low is not None and high is not None
    ]
    outline = [(x, high) for x, _, high in whole] + [(x, low) for x, low, _ in reversed(whole)]
    return path([outline]) + "Z"
