"""A scaling study as an HTML page in the design of the report: warnings, result, charts, table, method."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.measure.efficiency import GOOD, Scaling
from paceline.measure.scaling_report import (
    HEAD,
    TERMS,
    about,
    method,
    remarks,
    result,
    row_of,
    speedup_lines,
    warnings,
)
from paceline.plot.document import document, section
from paceline.plot.line import Curve, Line
from paceline.plot.markup import NOTHING, Html, table, tag
from paceline.plot.page import Axes, Charts

_GREY, _GOAL_COLOR = 7, 6


def to_html(studies: Sequence[Scaling]) -> str:
    """Return one self-contained page about all studies of a program."""
    newest = max(studies, key=lambda study: study.finished)
    charts = Charts()
    warned = [f"{study.kind} scaling: {text}" for study in studies for text in warnings(study)]
    parts = [
        tag("section", *(tag("p", text, class_="warning") for text in warned))
        if warned
        else NOTHING,
        tag("section", _card(newest, studies), class_="cards"),
    ]
    for study in studies:
        title = f"{study.kind.capitalize()} scaling"
        said = [result(study), *warnings(study)]  # at the top of the page
        notes = [remark for remark in remarks(study) if remark not in said]
        parts.append(section(title, *study_charts(study, 0, charts), study_table(study, notes)))
    terms = tag("ul", *(tag("li", line) for line in TERMS))
    parts.append(section("Terms", tag("figure", terms, class_="chart wide")))
    parts.append(tag("footer", f"made by paceline {newest.facts['paceline']}"))
    return document(f"Scalability of {newest.name}", charts, *parts).decode()


def _card(newest: Scaling, studies: Sequence[Scaling]) -> Html:
    verdicts = []
    for study in studies:
        words = f"{study.kind.capitalize()} scaling: {result(study)}."
        verdicts.append(tag("p", words, class_="verdict"))
    facts = []
    for title, lines in about(newest).items():
        facts += [tag("dt", title), *(tag("dd", line) for line in lines)]
    return tag("article", *verdicts, tag("dl", *facts, class_="origin lists"), class_="card")


def study_charts(study: Scaling, color: int, charts: Charts) -> list[Html]:
    """Return speed-up, both axes logarithmic, and efficiency by ranks; error bars show the spread over rounds."""
    ranks = [float(size.ranks) for size in study.sizes]
    efficiency = Curve(
        ranks,
        [size.efficiency for size in study.sizes],
        [min(size.efficiency, size.efficiency_low) for size in study.sizes],
        [max(size.efficiency, size.efficiency_high) for size in study.sizes],
        0,
    )
    ones = [1.0] * len(ranks)
    lines = [
        Line("measured", color, efficiency, error_bars=True),
        Line("ideal", _GREY, Curve.of(ranks, ones), dashed=True),
        Line(f"{GOOD:.0%}", _GOAL_COLOR, Curve.of(ranks, [GOOD] * len(ranks)), dashed=True),
    ]
    double_log = Axes("ranks", "speed-up", log_x=True, log_y=True)
    return [
        charts.add("Speed-up", study.kind, speedup_lines(study, color), axes=double_log),
        charts.add("Efficiency", study.kind, lines, axes=Axes("ranks", "efficiency", log_x=True)),
    ]


def study_table(study: Scaling, notes: Sequence[str], name: str = "") -> Html:
    """Return all sizes of a study as a table, with notes and the method below it."""
    cells = [[tag("td", cell, class_="n") for cell in row_of(size)] for size in study.sizes]
    rows = [tag("tr", *row) for row in cells]
    below = [tag("p", note, class_="note") for note in notes]
    how = tag("details", tag("summary", "How it was measured"), tag("p", method(study)))
    title = tag("h3", f"{study.kind.capitalize()} scaling")
    caption = tag("figcaption", title, tag("span", name, class_="unit"))
    body = table(list(HEAD), rows, "plain figures")
    return tag("figure", caption, body, *below, how, class_="chart wide")
