"""Lines over one x axis as one SVG file of a fixed size that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.plot.line import DARK, LIGHT, Line
from paceline.plot.markup import Html, tag
from paceline.plot.ticks import label, linear_ticks, log_ticks, ticks_with_zero

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 34, 46
_MOST_X_LABELS = 8
_LEGEND_ROW = 18
_DOTS_UP_TO = 60  # points of a line
_CAP = 4  # half the width of the end of an error bar
_MARGIN = 1.1  # above and below the values on a logarithmic axis
_DARK = "".join(
    f".c{place}{{stroke:{color}}}circle.c{place}{{fill:{color}}}"
    for place, color in enumerate(DARK)
)
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#334155}.grid{stroke:#94a3b8;stroke-opacity:.35}"
    ".paper{fill:#ffffff}"
    f"@media(prefers-color-scheme:dark){{text{{fill:#e2e8f0}}.paper{{fill:#1c2025}}{_DARK}}}"
)

Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """Lines over one x axis."""

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    x_label: Callable[[float], str] = "{:g}".format
    log_y: bool = False
    log_x: bool = True
    paper: bool = False
    """Whether it has a background, for pages that may be dark where the reader's system is light."""


def to_svg(plot: Plot) -> str:
    """Return the plot as one SVG element; values that an axis cannot show are left out."""
    points = [_drawable(line, log_y=plot.log_y) for line in plot.lines]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts = [tag("rect", class_="paper", width=_WIDTH, height=_HEIGHT)] if plot.paper else []
    parts += [
        _text(_LEFT, 18, plot.title, "start"),
        _text(middle, _HEIGHT - 8, plot.x_title),
        _y_title(plot.y_title),
    ]
    if any(points):
        shown = [point for each in points for point in each]
        shown += [(x, y) for line in plot.lines for x, *ends in _spreads(line) for y in ends]
        axes = _Axes(shown, log_x=plot.log_x, log_y=plot.log_y)
        parts += axes.grid(plot.x_label)
        for row, (line, drawn) in enumerate(zip(plot.lines, points, strict=True)):
            places = [(axes.x(x), axes.y(y)) for x, y in drawn]
            parts += [*_error_bars(line, axes), *_line(line, places), *_legend(line, row)]
    svg = tag(
        "svg", tag("style", Html(_STYLE)), *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT}", width=_WIDTH, height=_HEIGHT, role="img",
    )  # fmt: skip
    return f"{svg}\n"


def _drawable(line: Line, *, log_y: bool) -> list[Point]:
    points = []
    for x, y in zip(line.curve.steps, line.curve.mean, strict=True):
        if y is not None and x > 0 and math.isfinite(y) and (y > 0 or not log_y):
            points.append((x, y))
    return points


class _Axes:
    """The places of values in the picture."""

    def __init__(self, points: Sequence[Point], *, log_x: bool, log_y: bool) -> None:
        self._log_x, self._log_y = log_x, log_y
        self.xs = sorted({x for x, _ in points})
        self._low_x, self._high_x = self._across(self.xs[0]), self._across(self.xs[-1])
        if not log_x:
            self.xs = linear_ticks(self.xs[0], self.xs[-1])
        low, high = min(y for _, y in points), max(y for _, y in points)
        if log_y:
            low, high = low / _MARGIN, high * _MARGIN
            self.y_ticks = log_ticks(low, high)
        else:
            self.y_ticks = ticks_with_zero(low, high)
            low, high = self.y_ticks[0], self.y_ticks[-1]
        self._low_y, self._high_y = self._height(low), self._height(high)

    def _across(self, value: float) -> float:
        return math.log(value) if self._log_x else value

    def _height(self, value: float) -> float:
        return math.log10(value) if self._log_y else value

    def x(self, value: float) -> float:
        span = self._high_x - self._low_x
        share = (self._across(value) - self._low_x) / span if span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (self._height(value) - self._low_y) / (self._high_y - self._low_y)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self, x_label: Callable[[float], str]) -> list[Html]:
        parts = []
        for value in self.y_ticks:
            y = f"{self.y(value):.1f}"
            parts.append(tag("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y))
            parts.append(_text(_LEFT - 6, self.y(value) + 4, label(value), "end"))
        every = math.ceil(len(self.xs) / _MOST_X_LABELS)
        below = _HEIGHT - _BOTTOM + 18
        return parts + [_text(self.x(value), below, x_label(value)) for value in self.xs[::every]]


def _line(line: Line, places: Sequence[Point]) -> list[Html]:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [tag("polyline", points=points, fill="none", **_stroke(line))]
    if not line.dashed and len(places) <= _DOTS_UP_TO:
        color, name = LIGHT[line.color], f"c{line.color}"
        for x, y in places:
            parts.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, fill=color, class_=name))
    return parts


def _spreads(line: Line) -> list[tuple[float, float, float]]:
    """Return x, lowest and highest value of each point that has error bars."""
    spreads = []
    curve = line.curve
    for x, low, high in zip(curve.steps, curve.low, curve.high, strict=True):
        if line.error_bars and low is not None and high is not None and 0 < low < high and x > 0:
            spreads.append((x, low, high))
    return spreads


def _error_bars(line: Line, axes: _Axes) -> list[Html]:
    bars = []
    for place, low, high in _spreads(line):
        x = axes.x(place)
        ends = (axes.y(low), axes.y(high))
        caps = "".join(f"M{x - _CAP:.1f} {y:.1f}h{2 * _CAP}" for y in ends)
        bars.append(f"M{x:.1f} {ends[0]:.1f}V{ends[1]:.1f}{caps}")
    stroke = _stroke(line) | {"stroke_width": 1.2, "fill": "none"}
    return [tag("path", d="".join(bars), **stroke)] if bars else []


def _y_title(text: str) -> Html:
    """Return the title of the vertical axis, beside its ticks."""
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f"translate(14 {middle:.0f}) rotate(-90)"
    return tag("text", text, text_anchor="middle", transform=turned)


def _legend(line: Line, row: int) -> list[Html]:
    y = _TOP + 12 + _LEGEND_ROW * row
    left = _WIDTH - _RIGHT + 12
    key = tag("line", x1=left, x2=left + 16, y1=y - 4, y2=y - 4, **_stroke(line))
    return [key, _text(left + 22, y, line.name, "start")]


def _stroke(line: Line) -> dict[str, str | float | None]:
    # Attributes, not only a style: converters to PDF read no media queries.
    return {
        "class_": f"c{line.color}",
        "stroke": LIGHT[line.color],
        "stroke_width": 2,
        "stroke_dasharray": "5 4" if line.dashed else None,
    }


def _text(x: float, y: float, text: str, anchor: str = "middle") -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
