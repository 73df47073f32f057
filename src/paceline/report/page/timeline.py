"""Starts of a run on a time line: how each one ended, and when checkpoints were saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from paceline.plot.markup import NOTHING, Html, joined, table, tag
from paceline.plot.page import axis_label, key
from paceline.plot.shapes import SIZE
from paceline.plot.ticks import time_label, time_ticks
from paceline.units import human_size, human_time, short_time

_MARKS = 250  # checkpoints on a line; more would overlap
_ROWS = 20
_LAST_LABEL = 0.9  # of the width; a later label would not fit on a narrow page
_LONGEST_REASON = 300
_LEGEND = {"mark": "checkpoint", "stopped": "stopped", "failed": "failed or lost"}
_ENDINGS = {"ended": "finished"}
_HEAD = ["start", "at (UTC)", "for", "ranks", "from step", "to step", "lost", "ending"]

Run = Mapping[str, Any]


def timeline(runs: Sequence[Run]) -> Html:
    """Return all runs on one time axis, each from its first start."""
    known = [run for run in runs if run["starts"]]
    if not known:
        return NOTHING
    longest_s = max(max(1.0, _last_s(run) - _first_s(run)) for run in known)
    lanes = [_lane(run, longest_s, named=len(runs) > 1) for run in known]
    labels = []
    for seconds in time_ticks(longest_s):
        if seconds <= _LAST_LABEL * longest_s:
            x = SIZE * seconds / longest_s
            labels.append(axis_label("x", x, time_label(seconds)))
    unit = tag("span", "time since the first start", class_="unit")
    head = tag("figcaption", tag("h3", "Starts and checkpoints"), unit)
    axis = tag("div", *labels, class_="times")
    legend = tag("p", *(key(kind, text) for kind, text in _LEGEND.items()), class_="legend")
    return tag("figure", head, *lanes, axis, legend, class_="chart wide")


def _first_s(run: Run) -> float:
    return float(run["starts"][0]["time_s"])


def _last_s(run: Run) -> float:
    return float(max(start["last_s"] for start in run["starts"]))


def _lane(run: Run, longest_s: float, *, named: bool) -> Html:
    begun_s = _first_s(run)
    parts = []
    for place, start in enumerate(run["starts"]):
        parts.append(_part(start, begun_s, longest_s, run["color"], ending_of(run, place)))
    by_place = {}
    for save in run["checkpoints"]:
        share = ((save["time_s"] or begun_s) - begun_s) / longest_s
        if 0 <= share <= 1:
            by_place[round(share * _MARKS)] = (share, save["step"])
    marks = []
    for share, step in by_place.values():
        title = f"checkpoint of step {step:,}"
        marks.append(tag("i", class_="mark", style=f"left:{share:.2%}", title=title))
    name = tag("div", run["name"], class_="bar-name") if named else NOTHING
    return joined(name, tag("div", *parts, *marks, class_="lane"))


def _part(start: Run, begun_s: float, longest_s: float, color: int, ending: str) -> Html:
    left = (start["time_s"] - begun_s) / longest_s
    width = (start["last_s"] - start["time_s"]) / longest_s
    kind = ending if ending in {"failed", "stopped", "lost"} else ""
    steps = f"steps {start['from_step']:,} to {start['step']:,}"
    title = f"{steps} on {start['world_size']} ranks: {ending}"
    place = f"left:{max(0.0, left):.2%};width:{max(0.002, width):.2%}"
    return tag("div", class_=f"part c{color} {kind}".strip(), style=place, title=title)


def ending_of(run: Run, place: int) -> str:
    """Return how a start ended; only the last one may still be running."""
    ending = str(run["starts"][place]["ending"])
    if ending:
        return _ENDINGS.get(ending, ending)
    last = place == len(run["starts"]) - 1
    live = {"training", "suspended", "unresponsive"}
    return "running" if last and run["phase"] in live else "lost"


def starts_table(run: Run, *, several: bool) -> Html:
    """Return the last starts of a run as a table, with its checkpoints and problems."""
    places = range(len(run["starts"]))[-_ROWS:]
    rows = [_row(run, place) for place in places]
    title = tag("h3", run["name"]) if several else NOTHING
    notes = [tag("p", line, class_="note") for line in (_checkpoints(run), *_problems(run))]
    return joined(title, table(_HEAD, rows, "plain"), *notes)


def _row(run: Run, place: int) -> Html:
    start = run["starts"][place]
    ending = ending_of(run, place)
    if start["reason"]:
        ending += f": {start['reason'][:_LONGEST_REASON]}"
    cells = (
        str(place + 1),
        moment(start["time_s"]),
        human_time(start["last_s"] - start["time_s"]),
        str(start["world_size"]),
        f"{start['from_step']:,}",
        f"{start['step']:,}",
        f"{start['lost_steps']:,}",
    )
    return tag("tr", *(tag("td", cell, class_="n") for cell in cells), tag("td", ending))


def _checkpoints(run: Run) -> str:
    saves = run["checkpoints"]
    if not saves:
        return "no checkpoint was saved"
    held_s = median([save["held_s"] or 0.0 for save in saves])
    last = saves[-1]
    count = f"{len(saves):,} checkpoint{'s' if len(saves) > 1 else ''}"
    newest = f"newest: step {last['step']:,}, {human_size(last['size_bytes'])}"
    return f"{count}; {newest}; each one paused training for {short_time(held_s)} (median)"


def _problems(run: Run) -> list[str]:
    lines = []
    for event in run["troubles"][-_ROWS:]:
        reason = event["reason"][:_LONGEST_REASON]
        lines.append(f"{event['event']} at step {event['step']:,}: {reason}")
    return lines


def moment(time_s: float | None) -> str:
    """Return a date and time in UTC.

    >>> moment(0), moment(None), moment(1e300)
    ('1970-01-01 00:00', '?', '?')
    """
    if time_s is None:
        return "?"
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "?"
