"""Pictures of where the time went: how long steps take, and what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.report.page.markup import Html, tag
from paceline.report.page.plot import SIZE, axis_label, path
from paceline.report.page.ticks import label, linear_ticks
from paceline.units import short_time

_PARTS = {"data_s": "data", "own_s": "own", "rest_s": "wait"}
"""What is known of a step whose ranks tell no phases."""
_IN_WORDS = {
    "data": "waiting for samples", "own": "own work", "gc": "garbage collection", "other": "between two steps",
    "wait": "messages, and waiting for other ranks",
}  # fmt: skip
_COLORS = {
    "data_wait": 0, "data": 0, "compute": 1, "own": 1, "forward": 1, "backward": 6, "host_gaps": 2, "other": 2,
    "optimizer": 3, "exposed_communication": 4, "wait": 4, "gc": 5,
}  # fmt: skip
"""The same thing has the same colour everywhere."""

_SEEN = 0.002  # of a bar: less has no width


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
    ticks = [
        axis_label("x", across(value), label(value * 1000))
        for value in linear_ticks(left, right, 4)
    ]
    area = tag("div", tag("div", picture, *ticks, class_="area"), class_="plot")
    names = [
        tag("span", tag("i", class_=f"key c{run['color']}"), run["name"], class_="entry")
        for run in known
    ]
    legend = tag("span", *names, class_="legend") if len(runs) > 1 else Html("")
    head = tag(
        "figcaption", tag("h3", "Step time"), tag("span", "ms, how often", class_="unit"), legend
    )
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
    known = [(run, _parts(run["breakdown"])) for run in runs if run["breakdown"]]
    if not known:
        return Html("")
    several = len(runs) > 1
    rows = [_spent(run["name"] if several else "", parts) for run, parts in known]
    head = tag(
        "figcaption",
        tag("h3", "A step is spent on"),
        tag("span", "of late, mean over ranks", class_="unit"),
    )
    kinds = list(dict.fromkeys(kind for _, parts in known for kind in parts))
    return tag("figure", head, *rows, legend_of(kinds) if several else Html(""), class_="chart")


def _parts(found: Mapping[str, Any]) -> dict[str, float]:
    return dict(found["phases"]) or {kind: found[key] for key, kind in _PARTS.items()}


def _spent(name: str, parts: Mapping[str, float]) -> Html:
    step_s = max(sum(parts.values()), 1e-12)
    told = [
        f"{in_words(kind)}  {short_time(value)}, {value / step_s:.0%}"
        for kind, value in parts.items()
    ]
    shares = {kind: value / step_s for kind, value in parts.items()}
    return bar(name or f"{short_time(step_s)} a step", shares, told, said=not name)


def in_words(kind: str) -> str:
    """Return what a kind of time is called."""
    return _IN_WORDS.get(kind, kind.replace("_", " "))


def bar(name: str, shares: Mapping[str, float], told: Sequence[str], *, said: bool) -> Html:
    """Return a bar of parts, with what they are below it if that is to be said."""
    pieces = [
        tag("i", class_=_color(kind), style=f"width:{min(1.0, share):.2%}", title=words)
        for (kind, share), words in zip(shares.items(), told, strict=True)
        if share >= _SEEN
    ]
    values = [
        tag("span", tag("i", class_=f"key {_color(kind)}"), words)
        for kind, words in zip(shares, told, strict=True)
    ]
    return tag(
        "div",
        tag("div", name, class_="bar-name") if name else Html(""),
        tag("div", *pieces, class_="bar"),
        tag("div", *values, class_="said") if said else Html(""),
        class_=None if said else "slim",
    )


def legend_of(kinds: Sequence[str]) -> Html:
    """Return which colour is what, for several bars."""
    keys = [
        tag("span", tag("i", class_=f"key {_color(kind)}"), in_words(kind), class_="entry")
        for kind in kinds
    ]
    return tag("p", *keys, class_="legend")


def _color(kind: str) -> str:
    return f"p{_COLORS[kind]}"
