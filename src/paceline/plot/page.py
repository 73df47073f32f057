"""Charts within an HTML page: the SVG stretches with the page, the text beside it keeps its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.plot.line import Line
from paceline.plot.markup import NOTHING, Html, tag
from paceline.plot.shapes import SIZE, Mark, line_class, line_shapes, mark_shapes
from paceline.plot.text import is_steep
from paceline.plot.ticks import label, linear_ticks, log_ticks, span

_LABELS_UP_TO = 6  # points that are all labelled
_WORTH_A_LOG = 2.0  # largest over smallest value


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


@dataclass(frozen=True)
class Axes:
    """The titles of a chart's axes, and which are logarithmic."""

    x: str = "step"
    y: str = ""
    log_x: bool = False
    log_y: bool = False
    """Whether the vertical axis is logarithmic at first, if the values allow it."""
    x_label: Callable[[float], str] | None = None
    """The text of a tick, if it is not just the number."""


class Charts:
    """All charts of a page, and the data that its script needs for them."""

    def __init__(self, marks: Sequence[Mark] = (), clocks: Sequence[dict[str, Any]] = ()) -> None:
        """Draw marks into all charts over steps; a clock has the lists `steps`, `time_s` and `samples`."""
        self._marks, self._clocks = list(marks), list(clocks)
        self._charts: list[dict[str, Any]] = []

    def as_dict(self) -> dict[str, Any]:
        """Return what the script reads."""
        return {
            "charts": self._charts,
            "clocks": self._clocks,
            "marks": [vars(mark) for mark in self._marks],
        }

    def keep(self, data: dict[str, Any]) -> int:
        """Keep the data of a picture for the script; return its number."""
        self._charts.append(data)
        return len(self._charts) - 1

    def add(
        self,
        title: str,
        unit: str,
        lines: Sequence[Line],
        note: str = "",
        *,
        first: bool = False,
        axes: Axes | None = None,
    ) -> Html:
        """Return a chart, or nothing without values. The first one of a page is wide, and logarithmic if it is steep."""
        drawn = [line for line in lines if any(value is not None for value in line.curve.mean)]
        if not drawn:
            return NOTHING
        axes = axes or Axes(y=unit)
        scales, steep = _scales(drawn)
        across = _Across(*_x_range(drawn, log=axes.log_x), log=axes.log_x)
        number = self.keep(
            {
                "title": title,
                "x": [across.left, across.right],
                "scales": {scale.kind: [scale.low, scale.high] for scale in scales},
                "lines": [_line_data(line) for line in drawn],
                "axis": axes.x,
                "y_axis": axes.y,
                "log_x": axes.log_x,
            }
        )
        log_first = (steep and first) or axes.log_y
        pick, switch = _log_switch(number, on=log_first) if len(scales) > 1 else ("", "")
        unit_ = tag("span", unit, class_="unit")
        head = tag("figcaption", tag("h3", title), unit_, _legend(drawn), switch)
        marks = mark_shapes(self._marks if axes.x == "step" else [], across.place)
        frame = _Frame(number, title, drawn, across, axes, marks)
        plots = [frame.plot(scale) for scale in scales]
        below = tag("p", note, class_="note") if note else NOTHING
        return tag("figure", pick, head, *plots, below, class_="chart wide" if first else "chart")


@dataclass(frozen=True)
class _Across:
    """A horizontal axis."""

    left: float
    right: float
    log: bool

    def place(self, value: float) -> float:
        """Return the place of a value, from 0 on the left to SIZE."""
        left, right = self.left, self.right
        if self.log:
            value, left, right = math.log(value), math.log(left), math.log(right)
        return SIZE * (value - left) / (right - left)

    def ticks(self, lines: Sequence[Line]) -> list[float]:
        """Return the points themselves if they are few, as world sizes are; else round numbers."""
        points = sorted({step for line in lines for step in line.curve.steps})
        least = SIZE / 12  # labels nearer than this would overlap
        places = [self.place(point) for point in points]
        apart = all(later - sooner > least for sooner, later in pairwise(places))
        if apart and len(points) <= _LABELS_UP_TO:
            return points
        if self.log:
            return points[:: math.ceil(len(points) / _LABELS_UP_TO)]
        return [value for value in linear_ticks(self.left, self.right) if value.is_integer()]


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


def _x_range(lines: Sequence[Line], *, log: bool) -> tuple[float, float]:
    left = min(line.curve.steps[0] for line in lines)
    right = max(line.curve.steps[-1] for line in lines)
    if right > left:
        return left, right
    return (left / 2, right * 2) if log else (left - 1, right + 1)


def _line_data(line: Line) -> dict[str, Any]:
    curve = line.curve
    data = {"name": line.name, "color": line.color, "x": curve.steps, "y": curve.mean}
    data |= {"clock": line.clock, "dashed": line.dashed, "bars": line.error_bars}
    data["noisy"] = line.noisy
    return data | ({"low": curve.low, "high": curve.high} if curve.is_thinned else {})


def _legend(lines: Sequence[Line]) -> Html:
    if len(lines) < 2:
        return NOTHING
    return tag("span", *(key(line_class(line), line.name) for line in lines), class_="legend")


@dataclass(frozen=True)
class _Frame:
    """Everything of a chart but its vertical scale."""

    number: int
    title: str
    lines: Sequence[Line]
    across: _Across
    axes: Axes
    marks: Sequence[Html]

    def plot(self, scale: Scale) -> Html:
        """Return the picture on a scale, with its labels."""
        x, axes = self.across.place, self.axes
        grid = "".join(f"M0 {scale.y(value):.0f}H{SIZE}" for value in scale.ticks)
        shapes = [tag("path", class_="grid", d=grid), *self.marks]
        for line in self.lines:
            shapes += line_shapes(line, x, scale.y)
        drawn = picture(f"{self.title}, {scale.kind} scale", *shapes)
        texts = [axis_label("y", scale.y(value), label(value)) for value in scale.ticks]
        x_label = axes.x_label or label
        ticks = self.across.ticks(self.lines)
        texts += [axis_label("x", x(value), x_label(value)) for value in ticks]
        area = tag(
            "div", drawn, *texts, *axis_titles(axes.x, axes.y),
            class_="area", data_chart=self.number, data_scale=scale.kind,
        )  # fmt: skip
        return tag("div", area, class_=f"plot {scale.kind}")


def axis_titles(x: str, y: str) -> list[Html]:
    """Return the titles of both axes; an empty one is left out."""
    titles = [tag("span", x, class_="x-title")] if x else []
    return titles + ([tag("span", y, class_="y-title")] if y else [])
