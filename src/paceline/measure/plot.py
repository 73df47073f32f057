"""How measurements are drawn: lines over an axis that doubles, as one SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#64748b", "#0891b2", "#be185d")
_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 34, 46
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#334155}.grid{stroke:#94a3b8;stroke-opacity:.35}"
    "@media(prefers-color-scheme:dark){text{fill:#e2e8f0}}"
)


@dataclass(frozen=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]
    """In the order of x; what is not above 0 on an axis of logarithms is left out."""
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """Lines over one logarithmic axis."""

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    x_label: Callable[[float], str] = "{:g}".format
    log_y: bool = False


def to_svg(plot: Plot) -> str:
    """Return the plot as one SVG element; every text in it is only text."""
    lines = [Line(line.name, _drawable(line, log_y=plot.log_y), line.dashed) for line in plot.lines]
    points = [point for line in lines for point in line.points]
    parts = [
        _text(_LEFT, 18, plot.title, "start"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, plot.x_title),
    ]
    parts.append(_text(8, _TOP - 4, plot.y_title, "start"))
    if points:
        axes = _Axes(points, log_y=plot.log_y)
        parts += axes.grid(plot.x_label)
        parts += [part for number, line in enumerate(lines) for part in _line(line, number, axes)]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _drawable(line: Line, *, log_y: bool) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.points if x > 0 and math.isfinite(y) and (y > 0 or not log_y)]


class _Axes:
    """Where values lie on the page."""

    def __init__(self, points: Sequence[tuple[float, float]], *, log_y: bool) -> None:
        self._log_y = log_y
        self.xs = sorted({x for x, _ in points})
        ys = [y for _, y in points]
        self._low_x, self._high_x = math.log(self.xs[0]), math.log(self.xs[-1])
        if log_y:
            self._low_y, self._high_y = (
                float(math.floor(math.log10(min(ys)))),
                float(math.ceil(math.log10(max(ys)))),
            )
            self._high_y = max(self._high_y, self._low_y + 1)
        else:
            self._low_y, self._high_y = 0.0, _round_up(max(ys))

    def x(self, value: float) -> float:
        span = self._high_x - self._low_x
        share = (math.log(value) - self._low_x) / span if span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        place = math.log10(value) if self._log_y else value
        share = (place - self._low_y) / (self._high_y - self._low_y)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self, x_label: Callable[[float], str]) -> list[str]:
        parts = []
        for value in self._y_ticks():
            at = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            )
            parts.append(_text(_LEFT - 6, at + 4, f"{value:g}", "end"))
        step = -(-len(self.xs) // 8)
        parts += [
            _text(self.x(value), _HEIGHT - _BOTTOM + 18, x_label(value))
            for value in self.xs[::step]
        ]
        return parts

    def _y_ticks(self) -> list[float]:
        if self._log_y:
            return [10.0**power for power in range(int(self._low_y), int(self._high_y) + 1)]
        return [self._high_y * share / 4 for share in range(5)]


def _round_up(value: float) -> float:
    """Return the next number that is easy to read.

    >>> [_round_up(value) for value in (0.7, 3.1, 4.0, 0)]
    [0.8, 4.0, 4.0, 1.0]
    """
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(
        round(unit * step, 12) for step in (1, 2, 4, 6, 8, 10) if unit * step >= value * (1 - 1e-9)
    )


def _line(line: Line, number: int, axes: _Axes) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    places = [(axes.x(x), axes.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    if not line.dashed:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    at = _TOP + 12 + 18 * number
    left = _WIDTH - _RIGHT + 12
    parts.append(
        f'<line x1="{left}" x2="{left + 16}" y1="{at - 4}" y2="{at - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
    )
    return [*parts, _text(left + 22, at, line.name, "start")]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
