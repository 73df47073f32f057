"""Pictures of where the time went: how long steps take, what they are spent on, which rank is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.amounts import short_time
from paceline.report.markup import Html, joined, tag
from paceline.report.plot import SIZE, axis_label, path
from paceline.report.steptime import usual
from paceline.report.ticks import label, linear_ticks

_PARTS = {
    "data_s": "wait for data",
    "own_s": "own work: forward, and backward of all lanes but the last",
    "rest_s": "last backward, communication, update, waiting for other ranks",
}
_KINDS = {"data wait": 0, "compute": 1, "host gaps": 2, "optimizer": 3, "exposed communication": 4}
"""Colours of what a profile tells apart: the same thing has the same colour everywhere."""
_MOST_CELLS = 1024


def histogram(runs: Sequence[Mapping[str, Any]]) -> Html:
    """Return how step times are distributed, all runs on one scale."""
    known = [run for run in runs if run["step_time"]]
    if not known:
        return Html("")
    left = min(run["step_time"]["edges_s"][0] for run in known)
    right = max(run["step_time"]["edges_s"][-1] for run in known)

    def across(value: float) -> float:
        return float(SIZE * (value - left) / (right - left))

    shapes = [
        tag("path", class_=f"{kind} c{run['color']}", d=_outline(run["step_time"], across))
        for run in known
        for kind in ("fill", "line")
    ]
    picture = tag(
        "svg", *shapes,
        viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", role="img", aria_label="step times",
    )  # fmt: skip
    ticks = [axis_label("x", across(value), label(value * 1000)) for value in linear_ticks(left, right, 4)]
    area = tag("div", tag("div", picture, *ticks, class_="area"), class_="plot")
    names = [tag("span", tag("i", class_=f"key c{run['color']}"), run["name"], class_="entry") for run in known]
    legend = tag("span", *names, class_="legend") if len(runs) > 1 else Html("")
    head = tag("figcaption", tag("h3", "Step time"), tag("span", "ms, how often", class_="unit"), legend)
    note = "Each value is the mean of the steps between two step events. The last bar holds all longer ones, too."
    return tag("figure", head, area, tag("p", note, class_="note"), class_="chart")


def _outline(times: Mapping[str, Any], across: Any) -> str:
    edges, counts = times["edges_s"], times["counts"]
    highest = max(counts) * 1.04
    corners = [(across(edges[0]), float(SIZE))]
    for place, count in enumerate(counts):
        height = SIZE * (1 - count / highest)
        corners += [(across(edges[place]), height), (across(edges[place + 1]), height)]
    return path([[*corners, (across(edges[-1]), float(SIZE))]])


def breakdowns(runs: Sequence[Mapping[str, Any]]) -> Html:
    """Return what a step was spent on, a bar a run."""
    known = [run for run in runs if run["breakdown"]]
    if not known:
        return Html("")
    several = len(runs) > 1
    rows = [_spent(run["name"] if several else "", run["breakdown"]) for run in known]
    keys = [tag("span", tag("i", class_=f"key p{n}"), words, class_="entry") for n, words in enumerate(_PARTS.values())]
    head = tag("figcaption", tag("h3", "A step is spent on"), tag("span", "of late, mean over ranks", class_="unit"))
    legend = tag("p", *keys, class_="legend tall") if several else Html("")
    return tag("figure", head, *rows, legend, class_="chart")


def _spent(name: str, parts: Mapping[str, float]) -> Html:
    shares = {words: parts[key] / max(parts["step_s"], 1e-12) for key, words in _PARTS.items()}
    said = [f"{short_time(parts[key])} ({share:.0%})" for key, share in zip(_PARTS, shares.values(), strict=True)]
    if not name:
        said = [f"{told}  {words}" for told, words in zip(said, _PARTS.values(), strict=True)]
    return bar(name or f"{short_time(parts['step_s'])} a step", shares, said)


def bar(name: str, shares: Mapping[str, float], said: Sequence[str]) -> Html:
    """Return a bar of parts with what they are below it."""
    kinds = [f"p{_KINDS.get(words, place % 6)}" for place, words in enumerate(shares)]
    pieces = [
        tag("i", class_=kinds[place], style=f"width:{min(1.0, share):.2%}", title=f"{words}: {told}")
        for place, ((words, share), told) in enumerate(zip(shares.items(), said, strict=True))
    ]
    values = [tag("span", tag("i", class_=f"key {kinds[place]}"), told) for place, told in enumerate(said)]
    return tag(
        "div",
        tag("div", name, class_="bar-name"),
        tag("div", *pieces, class_="bar"),
        tag("div", *values, class_="said"),
    )


def heat_map(run: Mapping[str, Any], *, several: bool) -> Html:
    """Return the ranks of a run: which takes longer for its own part than the others, and which waits for data."""
    ranks = run["ranks"]
    if len(ranks) < 2:
        return Html("")
    middle = usual([rank["own_s"] for rank in ranks])
    slow = [(rank["own_s"] / middle - 1, short_time(rank["own_s"])) for rank in ranks]
    waits = [(rank["data_s"] / max(rank["own_s"], 1e-12), short_time(rank["data_s"])) for rank in ranks]
    head = tag("figcaption", tag("h3", "Ranks"), tag("span", run["name"] if several else "", class_="unit"))
    said = _slowest(run) or f"no rank stands out; the median of their own work is {short_time(middle)} a step"
    return tag(
        "figure", head,
        _cells("own work a step: pale as the median, full from twice the median on", ranks, slow),
        _cells("share of it that is a wait for data", ranks, waits),
        tag("p", said, class_="note"), class_="chart wide",
    )  # fmt: skip


def _slowest(run: Mapping[str, Any]) -> str:
    slow = run["slowest"]
    if not slow:
        return ""
    beat = slow["beat"]
    return f"rank {beat['rank']} on {beat['node']} takes {slow['times']} times as long as the others for its own part"


def _cells(words: str, ranks: Sequence[Mapping[str, Any]], values: Sequence[tuple[float, str]]) -> Html:
    """Return a cell a rank; of very many, the worst of each group of neighbours."""
    group = -(-len(ranks) // _MOST_CELLS)
    shown = [
        max(range(first, min(first + group, len(ranks))), key=lambda place: values[place][0])
        for first in range(0, len(ranks), group)
    ]
    few = "few" if len(shown) <= 32 else "many"
    cells = [_cell(ranks[place], *values[place], few=few == "few") for place in shown]
    grouped = f"; each cell is the worst of {group} ranks" if group > 1 else ""
    return joined(tag("p", f"{words}{grouped}", class_="small"), tag("div", *cells, class_=f"heat {few}"))


def _cell(rank: Mapping[str, Any], share: float, told: str, *, few: bool) -> Html:
    strength = f"--v:{0.06 + 0.94 * max(0.0, min(1.0, share)):.2f}"
    inside = (tag("b", str(rank["rank"])), tag("span", told)) if few else ()
    return tag("div", *inside, style=strength, title=f"rank {rank['rank']} on {rank['node']}: {told}")
