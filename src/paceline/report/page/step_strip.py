"""One step of all ranks, from a profile: a row per rank, colored by what it did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.measure.step_strip import KINDS
from paceline.plot.markup import NOTHING, Html, tag
from paceline.plot.page import axis_label, axis_titles, picture
from paceline.plot.shapes import SIZE
from paceline.plot.ticks import label, linear_ticks
from paceline.report.history import as_count, as_number
from paceline.report.page.step_times import color_of, legend_of
from paceline.report.page.studies import read_json
from paceline.units import short_time

_RANKS, _SPANS = 32, 400
_GAP = 0.12  # of a row
_LABELS = 16
_NOTE = (
    "Exchange: all ranks are in communication. Waiting: another rank still computes. Communication that computation hides is not shown. "
    "On a GPU these are times of the host."
)


def strip_from(path: Path) -> dict[str, Any] | None:
    """Return the step that `paceline profile` wrote; None if there is no such file, or it is damaged."""
    content = read_json(path)
    step_s, ranks = as_number(content.get("step_s")), content.get("ranks")
    if not 0 < step_s < 1e6 or not isinstance(ranks, list):
        return None
    known = [rank for rank in ranks[:_RANKS] if isinstance(rank, dict)]
    rows = [{kind: _spans(rank.get(kind), step_s) for kind in KINDS} for rank in known]
    if not rows:
        return None
    return {"step_s": step_s, "of_ranks": as_count(content.get("of_ranks")), "ranks": rows}


def _spans(value: Any, step_s: float) -> list[list[float]]:
    spans = []
    for span in value[:_SPANS] if isinstance(value, list) else []:
        if isinstance(span, list) and len(span) == 2:
            begin, end = map(as_number, span)
            if 0 <= begin < end <= 1.001 * step_s:
                spans.append([begin, end])
    return spans


def step_strip(run: Mapping[str, Any]) -> Html:
    """Return the rows with their legend."""
    strip = run["profile_step"]
    if not strip:
        return NOTHING
    rows, step_s = strip["ranks"], strip["step_s"]
    kinds = [kind for kind in KINDS if any(row[kind] for row in rows)]
    shapes = [tag("path", class_=f"span {color_of(kind)}", d=_path(kind, strip)) for kind in kinds]
    named = range(0, len(rows), math.ceil(len(rows) / _LABELS))
    labels = [axis_label("y", SIZE * (rank + 0.5) / len(rows), f"rank {rank}") for rank in named]
    for value in linear_ticks(0, step_s * 1000):
        labels += [axis_label("x", SIZE * value / (step_s * 1000), label(value))]
    titles = axis_titles("ms since the step began", "")
    height = f"height:{max(56, min(480, 30 * len(rows)))}px"
    drawn = picture("one step of all ranks", *shapes)
    area = tag("div", drawn, *labels, *titles, class_="area strip", style=height)
    count = f"{len(rows)} of {strip['of_ranks']:,} ranks, " if strip["of_ranks"] > len(rows) else ""
    unit = tag("span", f"{count}{short_time(step_s)}, profile of {run['name']}", class_="unit")
    head = tag("figcaption", tag("h3", "One step of all ranks"), unit)
    note = tag("p", _NOTE, class_="note")
    plot = tag("div", area, class_="plot")
    return tag("figure", head, plot, legend_of(kinds), note, class_="chart wide")


def _path(kind: str, strip: Mapping[str, Any]) -> str:
    row = SIZE / len(strip["ranks"])
    cells = []
    for rank, spans in enumerate(strip["ranks"]):
        top, tall = row * (rank + _GAP / 2), row * (1 - _GAP)
        for begin, end in spans[kind]:
            left, right = SIZE * begin / strip["step_s"], SIZE * end / strip["step_s"]
            cells.append(f"M{left:.2f} {top:.1f}H{right:.2f}v{tall:.1f}H{left:.2f}z")
    return "".join(cells)
