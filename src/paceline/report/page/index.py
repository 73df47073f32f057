"""One HTML file that lists all runs of a folder: a table with links to their reports, and their loss curves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.plot.document import document
from paceline.plot.downsample import downsample
from paceline.plot.line import LIGHT, Curve, Line
from paceline.plot.markup import NOTHING, Html, joined, table, tag
from paceline.plot.page import Axes, Charts
from paceline.redact import without_logins
from paceline.report.page.timeline import moment
from paceline.report.runs import RunSummary
from paceline.units import human_loss, human_size, human_time
from paceline.version import VERSION

_COLORS = len(LIGHT) - 1  # without the grey one
_MOST_CURVES = 2 * _COLORS  # each color solid and dashed
_LONGEST_REASON = 200
_METRICS = 3
_HEAD = [
    *("run", "state", "step", "loss", "evaluation", "trained for", "last start (UTC)", "ranks"),
    *("size", "checkpoints"),
]
_WRAPPED = {_HEAD.index("run"), _HEAD.index("evaluation")}
"""Columns of names that people choose: they may be long."""

Run = Mapping[str, Any]


def index_data(runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Return what `paceline runs --json` prints of each run, with its loss curve, as docs/report.md lists it."""
    return {"paceline": VERSION, "made_s": time.time(), "runs": [_facts(run) for run in runs]}


def _facts(run: RunSummary) -> dict[str, Any]:
    losses = [point.loss if math.isfinite(point.loss) else None for point in run.curve]
    steps = [point.step for point in run.curve]
    facts = run.facts()
    reason = without_logins(facts["reason"])
    return facts | {"reason": reason, "loss_curve": {"steps": steps, "loss": losses}}


def render_index(data: Mapping[str, Any], folder: Path) -> bytes:
    """Return the page that shows what `index_data` gathered; its links start in the folder of the page."""
    runs, charts = data["runs"], Charts()
    rows = [_row(run, place, folder) for place, run in enumerate(runs)]
    listed = tag("div", table(_HEAD, rows, "plain"), class_="wide")
    reasons = [_reason(run) for run in runs]
    count = len(runs)
    title = f"{count} run{'' if count == 1 else 's'}"
    note = f"the {_MOST_CURVES} newest of {count} runs" if count > _MOST_CURVES else ""
    axes = Axes(y="loss")
    chart = charts.add("Loss", "mean of all ranks", _lines(runs), note, first=True, axes=axes)
    curves = tag("section", tag("h2", "Curves"), tag("div", chart, class_="grid curves"))
    how = "`paceline report RUN` writes the report that a name leads to"
    made = f"made {moment(data['made_s'])} UTC by paceline {data['paceline']}; {how}"
    parts = [tag("section", listed, *reasons), *([curves] if chart else []), tag("footer", made)]
    return document(title, charts, *parts)


def _lines(runs: Sequence[Run]) -> list[Line]:
    """Return the loss curves of the newest runs."""
    lines = []
    for place, run in enumerate(runs[:_MOST_CURVES]):
        points = run["loss_curve"]
        if any(loss is not None for loss in points["loss"]):
            lines.append(Line(run["name"], place % _COLORS, _curve(points), dashed=_dashed(place)))
    return lines


def _curve(points: Mapping[str, Any]) -> Curve:
    losses = [math.nan if loss is None else loss for loss in points["loss"]]
    return downsample(points["steps"], losses, len(losses))


def _dashed(place: int) -> bool:
    return place >= _COLORS


def _row(run: Run, place: int, folder: Path) -> Html:
    color = f"key c{place % _COLORS}{' dashed' if _dashed(place) else ''}"
    key = tag("i", class_=color) if place < _MOST_CURVES and run["loss_curve"]["loss"] else ""
    total, ranks, loss = run["total_steps"], run["world_size"], run["loss"]
    values = [
        f"{run['step']:,} of {total:,}" if total else "",
        "" if loss is None else human_loss(loss),
        _evaluation(run["metrics"]),
        human_time(run["trained_s"]) if total else "",
        moment(run["started_s"]) if run["started_s"] else "",
        f"{ranks:,} on {run['device'].partition(':')[0]}" if ranks else "",
        human_size(run["size_bytes"]),
        _checkpoints(run),
    ]
    cells = [joined(key, _linked(run, folder)), _state(run), *values]
    shown = [tag("td", cell, class_="w" if n in _WRAPPED else "n") for n, cell in enumerate(cells)]
    return tag("tr", *shown)


def _linked(run: Run, folder: Path) -> Html | str:
    """Return the name of a run, as a link to its report if that exists."""
    name: str = run["name"]
    if run["report"] is None:
        return name
    path = os.path.relpath(run["report"], folder)
    return tag("a", name, href=f"./{quote(path, errors='surrogateescape')}")


def _state(run: Run) -> Html:
    phase = "damaged" if run["damage"] else "finished" if run["phase"] == "ended" else run["phase"]
    kind = "failed" if run["damage"] else run["phase"].replace(" ", "-")
    return tag("span", phase, class_=f"badge {kind}")


def _reason(run: Run) -> Html:
    """Return why a run failed, stopped or is damaged, for the lines below the table."""
    reason = (run["damage"] or run["reason"])[:_LONGEST_REASON]
    return tag("p", f"{run['name']}: {reason}", class_="note") if reason else NOTHING


def _evaluation(metrics: Mapping[str, float | None]) -> str:
    known = [(name, value) for name, value in metrics.items() if value is not None]
    return ", ".join(f"{name} {human_loss(value)}" for name, value in known[:_METRICS])


def _checkpoints(run: Run) -> str:
    if run["checkpoints"] is None:
        return f"at {run['checkpoints_at']}"
    damaged = run["damaged_checkpoints"]
    return f"{run['checkpoints']}, {damaged} damaged" if damaged else f"{run['checkpoints']}"
