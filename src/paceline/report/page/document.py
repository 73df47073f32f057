"""One HTML file that shows runs: it loads nothing, and works without its script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from paceline.plot.line import DARK, LIGHT, Curve, Line, css_colors
from paceline.plot.markup import NOTHING, Html, embedded, joined, tag
from paceline.plot.page import Charts
from paceline.report.page.rank_map import rank_maps
from paceline.report.page.step_times import breakdowns, histogram
from paceline.report.page.studies import profile, scaling
from paceline.report.page.tables import card, comparison
from paceline.report.page.timeline import moment, starts_table, timeline

_RUN_COLORS = len(LIGHT) - 1  # without the grey one
_MOST_CHARTS = 24  # of metrics
_THEMES = ("auto", "light", "dark")
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
    starts = [_wide(starts_table(run, several=several)) for run in runs if run["starts"]]
    sections = [
        tag("section", *cards, class_="cards"),
        _section("Curves", *_curves(runs, charts)),
        _section("Time", histogram(runs), breakdowns(runs), *maps),
        _section("Time line", timeline(runs), *starts),
        _section("Scaling", *(scaling(run, charts) for run in runs)),
        _section("Profile", *map(profile, runs)),
        _section("Settings", _wide(comparison(runs, "config", "Settings"))),
        _section("Environment", _wide(comparison(runs, "environment", "Environment"))),
    ]
    title = ", ".join(run["name"] for run in runs)
    made = f"made {moment(data['made_s'])} UTC by paceline {data['paceline']}"
    foot = tag("footer", f"{made}; steps are optimizer steps")
    body = joined(page_header(title), tag("main", *sections, foot))
    return html_document(title, body, embedded(charts.data)).encode()


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


def _wide(part: Html) -> Html:
    return tag("div", part, class_="wide") if part else NOTHING


def _section(title: str, *parts: str) -> Html:
    """Return a part of the page with its heading, or nothing if it is empty."""
    inside = joined(*parts)
    if not inside:
        return NOTHING
    name = title.split(maxsplit=1)[0].lower()
    return tag("section", tag("h2", title), tag("div", inside, class_=f"grid {name}"))


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


def page_header(title: str) -> Html:
    """Return the title of a page, and the switch between light and dark."""
    buttons = []
    for name in _THEMES:
        chosen: dict[str, str] = {"checked": ""} if name == "auto" else {}
        key = f"theme-{name}"
        buttons.append(tag("input", type="radio", name="theme", id=key, value=name, **chosen))
        buttons.append(tag("label", name, for_=key))
    themes = tag("div", *buttons, class_="themes", role="group", aria_label="colors")
    return tag("header", tag("h1", title), themes, class_="top")


def html_document(title: str, body: Html, data: Html) -> str:
    """Return a complete page with its style, its data and the one script that may run in it."""
    script = _resource("page.js")
    style = _resource("page.css")
    style = style.replace("/* light palette */", css_colors(LIGHT))
    style = style.replace("/* dark palette */", css_colors(DARK))
    # Should some text be taken for markup after all: nothing is loaded, and no other script runs.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - Paceline"),
        tag("style", Html(style)),
    )
    known = tag("script", data, type="application/json", id="data")
    page = tag("html", head, tag("body", body, known, tag("script", Html(script))), lang="en")
    return f"<!doctype html>\n{page}\n"


def _resource(name: str) -> str:
    return files("paceline.report.page").joinpath(name).read_text(encoding="utf-8")
