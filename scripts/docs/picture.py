"""Draw the README's picture: the digest and the speed at every world size, as an SVG from measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "images" / "measured.json"
WIDTH, HEIGHT, LEFT, TOP, ROW = 760, 340, 28, 112, 40
BAR_AT, BAR_WIDTH = 420, 250
STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 15px system-ui, sans-serif; fill: #24292f }
.title { font-size: 19px; font-weight: 600 }
.mono { font-family: ui-monospace, monospace }
.soft { fill: #57606a; font-size: 13px }
.same { fill: #00796b; font-weight: 600 }
.bar { fill: #00796b } .ideal { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
.card { fill: #1b1f27; stroke: #3d444d } text { fill: #e6edf3 } .soft { fill: #9da7b3 }
.same { fill: #4db6ac } .bar { fill: #4db6ac }
}
"""


def picture() -> str:
    """Return the SVG."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    alt = "On 1, 2, 4, 8 and 16 processes the same training gives the same SHA-256 of weights and optimizer state, each time faster."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12"/>',
        label(LEFT, 40, "One training, the same bits, on any number of processes", "title"),
        label(LEFT, 76, "processes", "soft"),
        label(LEFT + 92, 76, "SHA-256 of weights and optimizer state", "soft"),
        label(BAR_AT, 76, "samples per second (dashed: ideal)", "soft"),
        *(part for number, size in enumerate(found["sizes"]) for part in row(number, size, found)),
        label(LEFT, HEIGHT - 24, found["conditions"], "soft"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def row(number: int, size: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the digest and the bar of one world size."""
    y, first, last = TOP + number * ROW, found["sizes"][0], found["sizes"][-1]
    scale = BAR_WIDTH / (first["samples_per_s"] * last["ranks"])
    yield label(LEFT, y, str(size["ranks"]), "mono")
    yield label(LEFT + 92, y, found["digests"][str(size["ranks"])][:24], "mono same")
    wide, ideal = size["samples_per_s"] * scale, first["samples_per_s"] * size["ranks"] * scale
    yield f'<rect class="ideal" x="{BAR_AT}" y="{y - 15}" width="{ideal:.1f}" height="20" rx="3"/>'
    yield f'<rect class="bar" x="{BAR_AT}" y="{y - 15}" width="{wide:.1f}" height="20" rx="3"/>'
    yield label(BAR_AT + max(wide, ideal) + 8, y, f"{size['samples_per_s']:,.0f}", "mono")


def label(x: float, y: float, text: str, kind: str) -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>'
