"""One HTML file that shows runs: it asks nobody for anything, and its figures are there without its script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from paceline.report.page.downsample import Curve
from paceline.report.page.markup import Html, embedded, joined, tag
from paceline.report.page.plot import Charts, Line
from paceline.report.page.rank_map import rank_maps
from paceline.report.page.study_charts import profile, scaling
from paceline.report.page.tables import card, comparison
from paceline.report.page.timeline import moment, starts_table, timeline
from paceline.report.page.timing import breakdowns, histogram

COLORS = 7  # that a page tells apart; the eighth is grey
_MOST_CHARTS = 24  # of metrics
_THEMES = ("auto", "light", "dark")

Run = Mapping[str, Any]


def render_page(facts: Mapping[str, Any]) -> bytes:
    """Return the page of what `facts_of` found."""
    runs, charts = named_apart(facts["runs"]), Charts()
    sections = [
        tag(
            "section",
            *(card(run, several=len(runs) > 1) for run in runs),
            class_="cards",
        ),
        _section("Curves", *_curves(runs, charts)),
        _section(
            "Time",
            histogram(runs),
            breakdowns(runs),
            *(rank_maps(run, charts, several=len(runs) > 1) for run in runs),
        ),
        _section("Time line", timeline(runs), *_starts(runs)),
        _section("Scaling", *(scaling(run, charts) for run in runs)),
        _section("Where the time goes", *map(profile, runs)),
        _section("Settings", tag("div", comparison(runs, "config", "Settings"), class_="wide")),
        _section(
            "Environment", tag("div", comparison(runs, "environment", "Facts"), class_="wide")
        ),
    ]
    title = ", ".join(run["name"] for run in runs)
    foot = tag(
        "footer",
        f"made {moment(facts['made_s'])} UTC by paceline {facts['paceline']}; steps are optimizer steps",
    )
    body = joined(_header(title), tag("main", *sections, foot))
    return _document(title, body, embedded(charts.data)).encode()


def named_apart(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with a colour each, and with names that differ: where two have the same, by their folders.

    >>> [(run["name"], run["color"]) for run in named_apart([{"name": "a", "folder": "x/a"}, {"name": "a", "folder": "y/a"}])]
    [('x/a', 0), ('y/a', 1)]
    """
    names = [run["name"] for run in runs]
    return [
        {
            **run,
            "name": run["name"] if names.count(run["name"]) == 1 else run["folder"],
            "color": place % COLORS,
        }
        for place, run in enumerate(runs)
    ]


def _section(title: str, *parts: str) -> Html:
    """Return a part of the page; nothing if all of it is empty."""
    inside = joined(*parts)
    if not inside or inside == '<div class="wide"></div>':
        return Html("")
    return tag(
        "section",
        tag("h2", title),
        tag("div", inside, class_=f"grid {title.split(maxsplit=1)[0].lower()}"),
    )


def _curves(runs: Sequence[Run], charts: Charts) -> list[Html]:
    metrics = list(
        dict.fromkeys(name for run in runs for name in run["metric_curves"] if name != "eval_loss")
    )
    losses = [
        *_lines(runs, "curves", "loss"),
        *_lines(runs, "metric_curves", "eval_loss", ", evaluation"),
    ]
    shown = [charts.add("Loss", "mean of all ranks", losses, _not_finite(runs), first=True)]
    shown += [
        charts.add(name, "evaluation", _lines(runs, "metric_curves", name))
        for name in metrics[:_MOST_CHARTS]
    ]
    shown += [
        charts.add(title, unit, _lines(runs, "curves", name))
        for name, title, unit in (
            ("samples_per_s", "Speed", "samples/s"),
            ("lr", "Learning rate", ""),
            ("mfu", "Model FLOPs utilization", "share of the peak"),
        )
    ]
    if len(metrics) > _MOST_CHARTS:
        words = f"{len(metrics) - _MOST_CHARTS} more metrics are in `paceline report --json`"
        shown.append(tag("p", words, class_="note"))
    return shown


def _lines(runs: Sequence[Run], key: str, name: str, suffix: str = "") -> list[Line]:
    """Return a curve of every run that has it."""
    return [
        Line(
            f"{run['name']}{suffix}" if len(runs) > 1 else suffix.removeprefix(", ") or name,
            run["color"],
            Curve(**run[key][name]),
            dashed=bool(suffix),
        )
        for run in runs
        if name in run[key]
    ]


def _not_finite(runs: Sequence[Run]) -> str:
    found = {run["name"]: run["curves"].get("loss", {}).get("not_finite", 0) for run in runs}
    return "; ".join(
        f"{name}: {count:,} losses were not finite" for name, count in found.items() if count
    )


def _starts(runs: Sequence[Run]) -> list[Html]:
    several = len(runs) > 1
    return [
        tag("div", starts_table(run, several=several), class_="wide")
        for run in runs
        if run["starts"]
    ]


def _header(title: str) -> Html:
    buttons = []
    for name in _THEMES:
        chosen: dict[str, str] = {"checked": ""} if name == "auto" else {}
        buttons.append(
            tag("input", type="radio", name="theme", id=f"theme-{name}", value=name, **chosen)
        )
        buttons.append(tag("label", name, for_=f"theme-{name}"))
    return tag(
        "header",
        tag("h1", title),
        tag("div", *buttons, class_="themes", role="group", aria_label="colours"),
        class_="top",
    )


def _document(title: str, body: Html, data: Html) -> str:
    style, script = (_beside(name) for name in ("page.css", "page.js"))
    # Even if some text came through as markup: nothing is fetched, and no other script runs.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - Paceline"),
        tag("style", Html(style)),
    )
    known = tag("script", data, type="application/json", id="data")
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body, known, tag('script', Html(script))), lang='en')}\n"


def _beside(name: str) -> str:
    return files("paceline.report.page").joinpath(name).read_text(encoding="utf-8")
