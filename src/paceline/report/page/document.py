"""The report of one or several runs: which parts it has, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plot.document import document, section, wide
from paceline.plot.line import LIGHT, Curve, Line
from paceline.plot.markup import Html, tag
from paceline.plot.page import Charts
from paceline.report.page.failure_section import failure
from paceline.report.page.rank_map import rank_maps
from paceline.report.page.step_times import breakdowns, histogram
from paceline.report.page.studies import profile, scaling
from paceline.report.page.tables import card, comparison
from paceline.report.page.timeline import moment, starts_table, timeline

_RUN_COLORS = len(LIGHT) - 1  # without the grey one
_MOST_CHARTS = 24  # of metrics
_CURVES = (
    ("samples_per_s", "Speed", "samples/s"),
    ("lr", "Learning rate", ""),
    ("mfu", "Model FLOPs utilization", "share of the peak"),
)

Run = Mapping[str, Any]


def render_page(data: Mapping[str, Any]) -> bytes:
    """Return the page that shows what `report_data` gathered."""
    runs, charts = named_apart(data["runs"]), Charts()
    several = len(runs) > 1
    cards = [card(run, several=several) for run in runs]
    maps = [rank_maps(run, charts, several=several) for run in runs]
    starts = [wide(starts_table(run, several=several)) for run in runs if run["starts"]]
    sections = [
        tag("section", *cards, class_="cards"),
        section("Failure", *(failure(run, several=several) for run in runs)),
        section("Curves", *_curves(runs, charts)),
        section("Time", histogram(runs), breakdowns(runs), *maps),
        section("Time line", timeline(runs), *starts),
        section("Scaling", *(scaling(run, charts) for run in runs)),
        section("Profile", *map(profile, runs)),
        section("Settings", wide(comparison(runs, "config", "Settings"))),
        section("Environment", wide(comparison(runs, "environment", "Environment"))),
    ]
    title = ", ".join(run["name"] for run in runs)
    made = f"made {moment(data['made_s'])} UTC by paceline {data['paceline']}"
    foot = tag("footer", f"{made}; steps are optimizer steps")
    return document(title, charts, *sections, foot)


def named_apart(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with a color each; runs of the same name are named by their folders.

    >>> runs = [{"name": "a", "folder": "x/a"}, {"name": "a", "folder": "y/a"}]
    >>> [(run["name"], run["color"]) for run in named_apart(runs)]
    [('x/a', 0), ('y/a', 1)]
    """
    names = [run["name"] for run in runs]
    named: list[Run] = []
    for place, run in enumerate(runs):
        name = run["name"] if names.count(run["name"]) == 1 else run["folder"]
        named.append({**run, "name": name, "color": place % _RUN_COLORS})
    return named


def _curves(runs: Sequence[Run], charts: Charts) -> list[Html]:
    names = dict.fromkeys(name for run in runs for name in run["metric_curves"])
    metrics = [name for name in names if name != "eval_loss"]
    losses = _lines(runs, "curves", "loss")
    losses += _lines(runs, "metric_curves", "eval_loss", ", evaluation")
    shown = [charts.add("Loss", "mean of all ranks", losses, _not_finite(runs), first=True)]
    for name in metrics[:_MOST_CHARTS]:
        lines = _lines(runs, "metric_curves", name)
        shown.append(charts.add(name, "evaluation", lines))
    for name, title, unit in _CURVES:
        lines = _lines(runs, "curves", name)
        shown.append(charts.add(title, unit, lines))
    if len(metrics) > _MOST_CHARTS:
        more = f"{len(metrics) - _MOST_CHARTS} more metrics are in `paceline report --json`"
        shown.append(tag("p", more, class_="note"))
    return shown


def _lines(runs: Sequence[Run], part: str, name: str, suffix: str = "") -> list[Line]:
    lines = []
    for run in runs:
        if name in run[part]:
            title = f"{run['name']}{suffix}"
            if len(runs) == 1:
                title = suffix.removeprefix(", ") or name
            curve = Curve(**run[part][name])
            lines.append(Line(title, run["color"], curve, dashed=bool(suffix)))
    return lines


def _not_finite(runs: Sequence[Run]) -> str:
    notes = []
    for run in runs:
        count = run["curves"].get("loss", {}).get("not_finite", 0)
        if count:
            notes.append(f"{run['name']}: {count:,} losses were not finite")
    return "; ".join(notes)
