"""The failure page of a run, failure.md, as a part of the report."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.plot.markup import NOTHING, Html, table, tag, text
from paceline.redact import without_logins
from paceline.safe_open import read_text

_LARGEST_BYTES = 1 << 17
_CODE = "    "


def failure_of(path: Path) -> str | None:
    """Return the text of a failure page without secrets; None if there is no page, or none that can be shown."""
    try:
        page = read_text(path, _LARGEST_BYTES)
    except (OSError, ValueError):
        return None
    return "\n".join(map(without_logins, page.splitlines()))


def failure(run: Mapping[str, Any], *, several: bool) -> Html:
    """Return the page with its headings, traceback and table of steps."""
    if not run["failure"]:
        return NOTHING
    lines = [line for line in run["failure"].splitlines() if not line.startswith("# ")]
    parts = [_block(kind, list(block)) for kind, block in groupby(lines, _kind)]
    head = tag("figcaption", tag("h3", run["name"])) if several else NOTHING
    return tag("figure", head, *parts, class_="chart wide failure")


def _kind(line: str) -> str:
    """Return what a line of the page is."""
    if line.startswith(_CODE):
        return "code"
    if line.startswith("|"):
        return "table"
    return "heading" if line.startswith("#") else "text"


def _block(kind: str, lines: list[str]) -> Html:
    if kind == "code":
        shown = [text(line.removeprefix(_CODE).replace("\t", _CODE)) for line in lines]
        return tag("pre", Html("\n".join(shown)))
    if kind == "heading":
        return tag("h3", lines[-1].lstrip("# "))
    if kind == "text":
        words = " ".join(filter(None, lines))
        return tag("p", words) if words else NOTHING
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cells = [tag("tr", *(tag("td", cell, class_="n") for cell in row)) for row in rows[2:]]
    return table(rows[0], cells, "plain figures")
