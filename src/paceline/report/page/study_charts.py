"""What other verbs have measured of a run, as pictures: how it scales, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.measure.efficiency import Scaling
from paceline.measure.scaling_report import HEAD, method, remarks, row_of
from paceline.report.page.downsample import Curve
from paceline.report.page.markup import Html, joined, tag
from paceline.report.page.plot import Charts, Line
from paceline.report.page.timing import bar, in_words, legend_of
from paceline.units import short_time

_MOST_RANKS = 16  # bars of a profile


def scaling(run: Mapping[str, Any], charts: Charts) -> Html:
    """Return how the speed grows with the number of ranks."""
    studies = [Scaling.from_dict(found) for found in (run["scaling"] or {}).values()]
    return joined(*(part for study in studies for part in _study(study, run, charts)))


def _study(study: Scaling, run: Mapping[str, Any], charts: Charts) -> tuple[Html, ...]:
    rows = [
        tag("tr", *(tag("td", cell, class_="n") for cell in row_of(size))) for size in study.sizes
    ]
    head = tag("thead", tag("tr", *(tag("th", word, class_="n") for word in HEAD)))
    table = tag(
        "div", tag("table", head, tag("tbody", *rows), class_="plain figures"), class_="scroll"
    )
    notes = [tag("p", remark, class_="note") for remark in remarks(study)]
    how = tag("details", tag("summary", "How it was measured"), tag("p", method(study)))
    title = tag(
        "figcaption",
        tag("h3", f"{study.kind.capitalize()} scaling"),
        tag("span", run["name"], class_="unit"),
    )
    return *_charts(study, run["color"], charts), tag(
        "figure", title, table, *notes, how, class_="chart wide"
    )


def _charts(study: Scaling, color: int, charts: Charts) -> list[Html]:
    """Return speed-up and efficiency over ranks, beside what would be ideal and what is asked for."""
    ranks, asked = [float(size.ranks) for size in study.sizes], study.as_dict()["good_efficiency"]
    ideal = [rank / ranks[0] for rank in ranks]
    speedup = [size.speedup for size in study.sizes], ideal, [asked * value for value in ideal]
    efficiency = [size.efficiency for size in study.sizes], [1.0] * len(ranks), [asked] * len(ranks)
    words = f"over ranks, {study.kind} scaling"
    return [
        charts.add(title, words, _lines(color, ranks, asked, *values), axis="ranks")
        for title, values in (("Speed-up", speedup), ("Efficiency", efficiency))
    ]


def _lines(
    color: int,
    ranks: list[float],
    asked: float,
    found: list[float],
    ideal: list[float],
    least: list[float],
) -> list[Line]:
    return [
        Line("measured", color, _curve(ranks, found)),
        Line("ideal", 7, _curve(ranks, ideal), dashed=True),
        Line(f"{asked:.0%} efficiency", 6, _curve(ranks, least), dashed=True),
    ]


def _curve(x: list[float], y: Sequence[float]) -> Curve:
    values = list[float | None](y)
    return Curve(x, values, values, values, 0)


def profile(run: Mapping[str, Any]) -> Html:
    """Return where the time of a step goes, by a profile, and what to try."""
    found = run["profile"]
    if not found:
        return Html("")
    head = tag("figcaption", tag("h3", "Profile"), tag("span", run["name"], class_="unit"))
    said = [
        tag("p", line, class_="note" if place else None)
        for place, line in enumerate(found["sentences"])
    ]
    causes = [
        tag(
            "li",
            tag("b", cause["what"]),
            f" {_share(cause['seconds'], found['step_s'])}. Try: {cause['try']}",
        )
        for cause in found["causes"]
    ]
    below = tag("ol", *causes, class_="causes") if causes else Html("")
    return tag("figure", head, *said, *_bars(found), below, class_="chart wide")


def _bars(found: Mapping[str, Any]) -> list[Html]:
    """Return a bar a rank, all on one scale; of very many ranks, that of the decisive one."""
    ranks = found["per_rank"] if 1 < len(found["per_rank"]) <= _MOST_RANKS else [found["seconds"]]
    longest = max([sum(seconds.values()) for seconds in ranks] + [1e-12])
    if len(ranks) == 1:
        return [_bar("", ranks[0], longest, said=True)]
    rows = [
        _bar(
            f"rank {rank}" + (", which waits least" if rank == found["decisive_rank"] else ""),
            seconds,
            longest,
        )
        for rank, seconds in enumerate(ranks)
    ]
    return [*rows, legend_of(list(ranks[0]))]


def _bar(name: str, seconds: Mapping[str, float], longest: float, *, said: bool = False) -> Html:
    shares = {kind: value / longest for kind, value in seconds.items()}
    told = [f"{in_words(kind)} {short_time(value)}" for kind, value in seconds.items()]
    return bar(name, shares, told, said=said)


def _share(seconds: float | None, step_s: float) -> str:
    return "" if seconds is None else f"{short_time(seconds)}, {seconds / step_s:.0%} of a step"
