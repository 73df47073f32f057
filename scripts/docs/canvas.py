"""Shared drawing helpers of the figures: boxes, arrows, labels and time bars on one card, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH = 720
MARGIN = 36
STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 15px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
.title { font-size: 19px; font-weight: 600 }
.left { text-anchor: start } .right { text-anchor: end }
.soft { fill: #57606a; font-size: 14px }
.small { font-size: 13px }
.mono { font-family: ui-monospace, monospace; font-size: 14px }
.r0 { --c: #00796b } .r1 { --c: #1565c0 } .r2 { --c: #7b1fa2 } .r3 { --c: #6d7600 } .hot { --c: #d84315 } .dim { --c: #6e7781 }
.pale { fill: var(--c); fill-opacity: .14; stroke: var(--c); stroke-width: 1.5 }
.tint { fill: var(--c); fill-opacity: .13 } .blank { fill: #ffffff; stroke: var(--c); stroke-width: 1.5 }
.full { fill: var(--c) } .plus { fill: none; stroke: #ffffff; stroke-width: 2 } .onfull { fill: #ffffff; font-weight: 600 }
.open { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-dasharray: 4 3 }
.line { fill: none; stroke: var(--c); stroke-width: 2 }
.dash { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-dasharray: 4 3 }
.head { fill: var(--c) }
.name { fill: var(--c); font-weight: 600 }
@media (prefers-color-scheme: dark) {
.card { fill: #1b1f27; stroke: #3d444d }
text { fill: #e6edf3 }
.soft { fill: #9da7b3 }
.r0 { --c: #4db6ac } .r1 { --c: #64b5f6 } .r2 { --c: #ce93d8 } .r3 { --c: #c5cf4a } .hot { --c: #ff8a65 } .dim { --c: #8b949e }
.onfull { fill: #10141a } .blank { fill: #1b1f27 } .plus { stroke: #1b1f27 }
.name { fill: var(--c) }
}
"""


class Canvas:
    """One figure: a card with a title, on which the helpers draw."""

    def __init__(self, title: str, subtitle: str, height: int, alt: str) -> None:
        self._height, self._alt = height, alt
        self._parts: list[str] = []
        self.text(WIDTH / 2, 38, title, "title")
        self.text(WIDTH / 2, 63, subtitle, "soft")

    def svg(self) -> str:
        """Return the figure."""
        size = f'viewBox="0 0 {WIDTH} {self._height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self._alt)}">'
        card = f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{self._height - 2}" rx="12"/>'
        return "\n".join([head, f"<style>{STYLE}</style>", card, *self._parts, "</svg>"]) + "\n"

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write a line of text; y is its baseline."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, wide: float, high: float, kind: str, words: str = "") -> None:
        """Draw a box with words in its middle; its kind is a colour and one of pale, full, open."""
        shape = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="4"'
        self._parts.append(f'<rect class="{kind}" {shape}/>')
        if words:
            style = "onfull" if "full" in kind.split() else ""
            self.text(x + wide / 2, y + high / 2 + 5, words, f"{style} small")

    def plus(self, x: float, y: float, colour: str) -> None:
        """Draw the sign of an addition."""
        self._parts.append(f'<circle class="full {colour}" cx="{x:g}" cy="{y:g}" r="10"/>')
        self._parts.append(f'<path class="plus" d="M{x - 5:g} {y:g}h10M{x:g} {y - 5:g}v10"/>')

    def row(
        self, x: float, y: float, wide: float, high: float, cells: Sequence[tuple[str, str]]
    ) -> None:
        """Draw boxes of one size side by side, each given as (kind, words)."""
        for number, (kind, words) in enumerate(cells):
            self.box(x + number * wide + 1.5, y, wide - 3, high, kind, words)

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        self._parts.append(f'<path class="{kind}" d="M{_joined(points)}"/>')

    def area(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Fill the area within points."""
        self._parts.append(f'<path class="{kind}" d="M{_joined(points)}Z"/>')

    def arrow(
        self, points: Sequence[tuple[float, float]], colour: str, style: str = "line"
    ) -> None:
        """Draw a line through points with a head at its end."""
        (x0, y0), (x1, y1) = points[-2:]
        angle = math.atan2(y1 - y0, x1 - x0)
        back = (x1 - 9 * math.cos(angle), y1 - 9 * math.sin(angle))
        self.path([*points[:-1], back], f"{style} {colour}")
        sides = [
            (x1 - 11 * math.cos(angle + turn), y1 - 11 * math.sin(angle + turn))
            for turn in (0.45, -0.45)
        ]
        self.area([(x1, y1), *sides], f"head {colour}")


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
