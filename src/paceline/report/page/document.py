"""The report of one or several runs: which parts it has, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plot.document import document, section, wide
from paceline.plot.line import LIGHT, Curve, Line
from paceline.plot.markup import Html, tag
from paceline.plot.page import Axes, Charts
from paceline.report.page.curve_controls import curve_controls, marks_of
from paceline.report.page.failure_section import failure
from paceline.report.page.rank_map import rank_maps
from paceline.report.page.step_strip import step_strip
from paceline.report.page.step_times import breakdowns, histogram
from paceline.report.page.studies import profile, scaling
from paceline.report.page.tables import card, comparison, constant_of
from paceline.report.page.timeline import moment, starts_table, timeline
from paceline.report.page.usage_charts import usage_charts

_RUN_COLORS = len(LIGHT) - 1  # without the grey one
_MOST_CHARTS = 24  # of metrics
_LONGEST_TITLE = 24  # characters of an axis
_CURVES = (
    ("samples_per_s", "Speed", "samples/s"),
    ("lr", "Learning rate", "learning rate"),
    ("mfu", "Model FLOPs utilization", "share of the peak"),
)

Run = Mapping[str, Any]


def render_page(data: Mapping[str, Any]) -> bytes:
    """Return the page that shows what `report_data` gathered."""
    runs = named_apart(data["runs"])
    clocks = [run["clock"] or {"steps": [], "time_s": [], "samples": []} for run in runs]
    marks = [mark for run in runs for mark in marks_of(run)]
    charts = Charts(marks, clocks)
    several = len(runs) > 1
    cards = [card(run, several=several) for run in runs]
    maps = [rank_maps(run, charts, several=several) for run in runs]
    starts = [wide(starts_table(run, several=several)) for run in runs if run["starts"]]
    sections = [
        tag("section", *cards, class_="cards"),
        section("Failure", *(failure(run, several=several) for run in runs)),
        section("Curves", *_curves(runs, charts), above=curve_controls(marks)),
        section("Memory and utilization", *usage_charts(runs, charts)),
        section("Time", histogram(runs), breakdowns(runs), *maps),
        section("Time line", timeline(runs), *starts),
        section("Scaling", *(scaling(run, charts) for run in runs)),
        section("Profile", *map(step_strip, runs), *map(profile, runs)),
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
    axes = Axes(y="loss")
    note = _not_finite(runs)
    shown = [charts.add("Loss", "mean of all ranks", losses, note, first=True, axes=axes)]
    for name in metrics[:_MOST_CHARTS]:
        lines = _lines(runs, "metric_curves", name)
        shown.append(charts.add(name, "evaluation", lines, axes=Axes(y=name[:_LONGEST_TITLE])))
    for name, title, y_title in _CURVES:
        if not all(constant_of(run, name) is not None for run in runs):  # else it is in the cards
            lines = _lines(runs, "curves", name)
            shown.append(charts.add(title, "", lines, axes=Axes(y=y_title)))
    if len(metrics) > _MOST_CHARTS:
        more = f"{len(metrics) - _MOST_CHARTS} more metrics are in `paceline report --json`"
        shown.append(tag("p", more, class_="note"))
    return shown


def _lines(runs: Sequence[Run], part: str, name: str, suffix: str = "") -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        if name in run[part]:
            title = f"{run['name']}{suffix}"
            if len(runs) == 1:
                title = suffix.removeprefix(", ") or name
            curve = Curve(**run[part][name])
            noisy = part == "curves" and name != "lr"
            line = Line(title, run["color"], curve, bool(suffix), noisy=noisy, clock=number)
            lines.append(line)
    return lines


def _not_finite(runs: Sequence[Run]) -> str:
    notes = []
    for run in runs:
        count = run["curves"].get("loss", {}).get("not_finite", 0)
        if count:
            notes.append(f"{run['name']}: {count:,} losses were not finite")
    return "; ".join(notes)
