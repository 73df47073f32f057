"""When a run was started, how each start came to its end, and when it saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from paceline.report.page.markup import Html, joined, tag
from paceline.report.page.plot import SIZE, axis_label
from paceline.report.page.ticks import time_label, time_ticks
from paceline.units import human_size, human_time, short_time

_MARKS = 250  # checkpoints on a line; more would touch each other
_ROWS = 20
_ROOM = 0.9  # of the width: what begins later would not end on a narrow page


def timeline(runs: Sequence[Mapping[str, Any]]) -> Html:
    """Return all runs on one scale of time, each from its first start on."""
    known = [run for run in runs if run["starts"]]
    if not known:
        return Html("")
    whole_s = max(max(1.0, _last(run) - _first(run)) for run in known)
    lanes = [_lane(run, whole_s, named=len(runs) > 1) for run in known]
    seen = [value for value in time_ticks(whole_s) if value <= _ROOM * whole_s]
    ticks = [axis_label("x", SIZE * value / whole_s, time_label(value)) for value in seen]
    keys = [
        tag("span", tag("i", class_=f"key {kind}"), words, class_="entry")
        for kind, words in (
            ("mark", "checkpoint"),
            ("stopped", "stopped"),
            ("failed", "failed or gone"),
        )
    ]
    head = tag(
        "figcaption",
        tag("h3", "Starts and checkpoints"),
        tag("span", "time since the first start", class_="unit"),
    )
    axis = tag("div", *ticks, class_="times")
    return tag("figure", head, *lanes, axis, tag("p", *keys, class_="legend"), class_="chart wide")


def _first(run: Mapping[str, Any]) -> float:
    return float(run["starts"][0]["time_s"])


def _last(run: Mapping[str, Any]) -> float:
    return float(max(start["last_s"] for start in run["starts"]))


def _lane(run: Mapping[str, Any], whole_s: float, *, named: bool) -> Html:
    begun = _first(run)
    parts = [
        _part(start, begun, whole_s, run["color"], ending_of(run, place))
        for place, start in enumerate(run["starts"])
    ]
    saved = {}
    for save in run["checkpoints"]:
        place = ((save["time_s"] or begun) - begun) / whole_s
        if 0 <= place <= 1:
            saved[round(place * _MARKS)] = (place, save["step"])
    marks = [
        tag("i", class_="mark", style=f"left:{place:.2%}", title=f"checkpoint of step {step:,}")
        for place, step in saved.values()
    ]
    name = tag("div", run["name"], class_="bar-name") if named else Html("")
    return joined(name, tag("div", *parts, *marks, class_="lane"))


def _part(start: Mapping[str, Any], begun: float, whole_s: float, color: int, ending: str) -> Html:
    left, width = (start["time_s"] - begun) / whole_s, (start["last_s"] - start["time_s"]) / whole_s
    kind = ending if ending in {"failed", "stopped"} else "lost" if ending == "gone" else ""
    said = f"steps {start['from_step']:,} to {start['step']:,} on {start['world_size']} ranks: {ending}"
    place = f"left:{max(0.0, left):.2%};width:{max(0.002, width):.2%}"
    return tag("div", class_=f"part c{color} {kind}".strip(), style=place, title=said)


def ending_of(run: Mapping[str, Any], place: int) -> str:
    """Return how a start came to its end; only the last one may still go on."""
    found = str(run["starts"][place]["ending"])
    last = place == len(run["starts"]) - 1
    return found or ("goes on" if last and run["phase"] == "training" else "gone")


def starts_table(run: Mapping[str, Any], *, several: bool) -> Html:
    """Return the starts of a run as a table, the last ones, with what it saved and what went wrong."""
    rows = [_row(run, place) for place in range(len(run["starts"]))][-_ROWS:]
    heads = ("start", "at (UTC)", "for", "ranks", "from step", "to step", "lost", "ending")
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", word) for word in heads))),
        tag("tbody", *rows),
        class_="plain",
    )
    title = tag("h3", run["name"]) if several else Html("")
    said = [tag("p", line, class_="note") for line in (_saves(run), *_troubles(run)) if line]
    return joined(title, tag("div", table, class_="scroll"), *said)


def _row(run: Mapping[str, Any], place: int) -> Html:
    start, reason = run["starts"][place], run["starts"][place]["reason"]
    cells = (
        str(place + 1), moment(start["time_s"]), human_time(start["last_s"] - start["time_s"]), str(start["world_size"]),
        f"{start['from_step']:,}", f"{start['step']:,}", f"{start['lost_steps']:,}",
    )  # fmt: skip
    ending = ending_of(run, place) + (f": {reason[:300]}" if reason else "")
    return tag("tr", *(tag("td", cell, class_="n") for cell in cells), tag("td", ending))


def _saves(run: Mapping[str, Any]) -> str:
    saves = run["checkpoints"]
    if not saves:
        return "no checkpoint was saved"
    held = median([save["held_s"] or 0.0 for save in saves])
    last = saves[-1]
    return (
        f"{len(saves):,} checkpoint{'s' if len(saves) > 1 else ''}; the last one of step {last['step']:,}, "
        f"{human_size(last['size_bytes'])}; the training was held {short_time(held)} for each"
    )


def _troubles(run: Mapping[str, Any]) -> list[str]:
    return [
        f"{event['event']} at step {event['step']:,}: {event['reason'][:300]}"
        for event in run["troubles"][-_ROWS:]
    ]


def moment(time_s: float | None) -> str:
    """Return a moment, as all read it alike.

    >>> moment(0), moment(None), moment(1e300)
    ('1970-01-01 00:00', '?', '?')
    """
    try:
        return (
            datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M")
            if time_s is not None
            else "?"
        )
    except (ValueError, OverflowError, OSError):
        return "?"
