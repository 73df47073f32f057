"""Which rank was slow, and when? A map of ranks by steps, and a table of ranks by phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from paceline.plot.markup import NOTHING, Html, joined, table, tag
from paceline.plot.page import Charts, axis_label, axis_titles, picture
from paceline.plot.shapes import SIZE
from paceline.plot.ticks import label
from paceline.report.page.step_times import median_or_one
from paceline.telemetry.phases import PHASES, WAIT
from paceline.telemetry.rank_times import RankSample, downsample, read_samples
from paceline.units import short_time

_COLUMNS, _ROWS = 96, 64  # of a map at most
_SHADES = 12
_LABELS = 6
_PHASE_ROWS = 16
_SENTENCES = 5

Rows = Sequence[Sequence[float | None]]


def rank_times_of(path: Path) -> dict[str, Any] | None:
    """Return each rank's own time at some steps; with very many ranks, the slowest of each group of neighbours."""
    samples = downsample(read_samples(path), _COLUMNS)
    size = max((len(sample.own_s) for sample in samples), default=0)
    if size < 2:
        return None
    group = math.ceil(size / _ROWS)
    first_ranks = list(range(0, size, group))
    own_s = []
    for rank in first_ranks:
        row = [_slowest_of_group(sample, rank, group) for sample in samples]
        own_s.append(row)
    return {"steps": [sample.step for sample in samples], "ranks": first_ranks, "own_s": own_s}


def _slowest_of_group(sample: RankSample, first: int, group: int) -> float | None:
    times = sample.own_s[first : first + group]
    return max((time_s for time_s in times if time_s is not None), default=None)


def rank_maps(run: Mapping[str, Any], charts: Charts, *, several: bool) -> Html:
    """Return the map and the table of a run with several ranks."""
    ranks = run["ranks"]
    if len(ranks) < 2 and not run["rank_times"]:
        return NOTHING
    name = tag("span", run["name"] if several else "", class_="unit")
    head = tag("figcaption", tag("h3", "Ranks"), name)
    reports = run["slow_ranks"][-_SENTENCES:]
    sentences = [f"step {report['step']:,}: {report['sentence']}" for report in reports]
    notes = [tag("p", line, class_="note") for line in sentences or [_straggler(run)]]
    return tag(
        "figure", head, _by_steps(run, charts), _by_phases(ranks), *notes, class_="chart wide"
    )


def _straggler(run: Mapping[str, Any]) -> str:
    slow = run["slowest"]
    if not slow:
        return "No slow rank"
    beat = slow["beat"]
    return f"rank {beat['rank']} ({beat['node']}) is slow: {slow['times']} x the time of the others"


def _by_steps(run: Mapping[str, Any], charts: Charts) -> Html:
    """Return ranks by steps: the redder a cell, the longer the rank's own work took."""
    times = run["rank_times"]
    if not times:
        return NOTHING
    steps, ranks, own_s = times["steps"], times["ranks"], times["own_s"]
    middle = median_or_one([value for row in own_s for value in row if value is not None])
    group = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    title = f"Time per step by rank (pale: median {short_time(middle)}; dark: 2 x or more)"
    if group > 1:
        title += f"; each row is the slowest of {group} ranks"
    number = charts.keep({"steps": steps, "ranks": ranks, "own_s": own_s})
    cells = picture("time per step by rank", *_cells(own_s, middle))
    height = max(56, min(320, 22 * len(ranks)))
    area = tag(
        "div", cells, *_rank_labels(ranks), *_step_labels(steps), *axis_titles("step", ""),
        class_="area map", data_map=number, style=f"height:{height}px",
    )  # fmt: skip
    return joined(tag("p", title, class_="small"), tag("div", area, class_="plot"))


def _cells(rows: Rows, middle: float) -> list[Html]:
    """Return one path per shade, with all its cells."""
    shades: dict[int, list[str]] = {}
    height = SIZE / len(rows)
    for place, row in enumerate(rows):
        width, top = SIZE / len(row), place * height
        for column, value in enumerate(row):
            if value is not None:
                shade = round(_SHADES * max(0.0, min(1.0, value / middle - 1)))
                cell = f"M{column * width:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
                shades.setdefault(shade, []).append(cell)
    paths = []
    for shade, cells in sorted(shades.items()):
        opacity = f"--v:{strength(shade / _SHADES)}"
        paths.append(tag("path", class_="shade", d="".join(cells), style=opacity))
    return paths


def strength(share: float) -> str:
    """Return the opacity of a cell: at least 0.08, so that every cell is visible.

    >>> strength(0), strength(0.5), strength(7)
    ('0.08', '0.54', '1.00')
    """
    return f"{0.08 + 0.92 * max(0.0, min(1.0, share)):.2f}"


def _rank_labels(ranks: Sequence[int]) -> list[Html]:
    labels = []
    for place in range(0, len(ranks), math.ceil(len(ranks) / _LABELS)):
        text = str(ranks[place]) if place else f"rank {ranks[place]}"
        labels.append(axis_label("y", SIZE * (place + 0.5) / len(ranks), text))
    return labels


def _step_labels(steps: Sequence[int]) -> list[Html]:
    every = math.ceil(len(steps) / _LABELS)
    labels = []
    for place in range(every // 2, len(steps), every):
        x = SIZE * (place + 0.5) / len(steps)
        labels.append(axis_label("x", x, label(steps[place])))
    return labels


def _by_phases(ranks: Sequence[Mapping[str, Any]]) -> Html:
    """Return ranks by phases: the redder a cell, the longer than on the other ranks."""
    if len(ranks) < 2:
        return NOTHING
    slowest = sorted(ranks, key=lambda rank: -rank["own_s"])[:_PHASE_ROWS]
    medians = {phase: median(_spent(rank, phase) for rank in ranks) for phase in PHASES}
    own_s = median_or_one([rank["own_s"] for rank in ranks])
    rows = []
    for rank in sorted(slowest, key=lambda rank: int(rank["rank"])):
        cells = [tag("th", f"rank {rank['rank']}"), tag("td", rank["node"])]
        for phase in PHASES:
            seconds = _spent(rank, phase)
            cells.append(_cell(seconds, (seconds - medians[phase]) / own_s))
        cells.append(_cell(_spent(rank, WAIT), 0.0))
        cells.append(_cell(rank["own_s"], rank["own_s"] / own_s - 1))
        rows.append(tag("tr", *cells))
    head = ["", "node", *PHASES, "waiting for others", "own work"]
    title = "Time per step by phase (mean of recent steps)"
    if len(ranks) > _PHASE_ROWS:
        title += f"; the {_PHASE_ROWS} slowest of {len(ranks):,} ranks"
    return joined(tag("p", title, class_="small"), table(head, rows, "phases"))


def _spent(rank: Mapping[str, Any], phase: str) -> float:
    """Return the seconds of a phase; without phases, data and the rest of the rank's own time."""
    if not rank["phases"]:
        known = {"data": rank["data_s"], "forward": rank["own_s"] - rank["data_s"]}
        return float(known.get(phase, 0.0))
    spent = rank["phases"].get(phase)
    return float(spent["mean_s"] or 0.0) if spent else 0.0


def _cell(seconds: float, share: float) -> Html:
    text = tag("span", short_time(seconds))
    return tag("td", text, class_="n shade", style=f"--v:{strength(share)}")
