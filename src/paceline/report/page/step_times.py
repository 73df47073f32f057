"""How long a step takes, how that varies, and what the time goes to: the numbers and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy

from paceline.plot.markup import NOTHING, Html, tag
from paceline.plot.page import axis_label, axis_titles, key, picture
from paceline.plot.shapes import SIZE, path
from paceline.plot.ticks import label, linear_ticks
from paceline.report.history import as_number
from paceline.report.page.event_columns import EventColumns
from paceline.telemetry.heartbeat import NO_TIME, Beat
from paceline.telemetry.phases import PHASES, WAIT
from paceline.units import short_time

_BARS = 40
_RECENT = 20  # step events that tell how long a step takes now
_WITHOUT_PHASES = {"data_s": "data", "own_s": "own", "rest_s": "wait"}
_NAMES = {
    "data": "waiting for samples", "own": "own work", "gc": "garbage collection", "other": "between steps",
    "wait": "communication, and waiting for other ranks", "waiting": "waiting for other ranks",
}  # fmt: skip
_COLORS = {
    "data_wait": 0, "data": 0, "compute": 1, "own": 1, "forward": 1, "backward": 6, "host_gaps": 2, "other": 2,
    "optimizer": 3, "exposed_communication": 4, "wait": 4, "gc": 5,
    "exchange": 4, "waiting": 5, "useful_s": 3, "repeated_s": 0, "other_s": 2, "down_s": 5,
}  # fmt: skip
"""The same kind of time has the same color in all pictures."""
_NARROWEST = 0.002  # of a bar; less is invisible
_NOTE = (
    "Each value is the mean of the steps between two step events. "
    "The last bar also counts all longer steps."
)

Run = Mapping[str, Any]


def step_time_distribution(columns: EventColumns) -> dict[str, Any] | None:
    """Return quantiles and a histogram of step times, each the mean between two step events.

    The last bar also counts the longest 1 %.
    """
    batch = as_number(columns.started.get("global_batch"))
    rates = numpy.frombuffer(columns.steps["samples_per_s"], dtype=float)
    rates = rates[numpy.isfinite(rates) & (rates > 0)]
    if not rates.size or not batch > 0:
        return None
    times = batch / rates
    low, middle, high, longest = numpy.quantile(times, [0.05, 0.5, 0.95, 0.99]).tolist()
    edges = numpy.linspace(times.min(), max(longest, times.min() * 1.01), _BARS + 1)
    counts, _ = numpy.histogram(numpy.minimum(times, edges[-1]), edges)
    return {
        "samples_per_s": float(numpy.median(rates)),
        "median_s": middle,
        "p5_s": low,
        "p95_s": high,
        "late_s": float(numpy.median(times[-_RECENT:])),
        "edges_s": [_six_digits(edge) for edge in edges],
        "counts": [int(count) for count in counts],
    }


def breakdown(times: Run | None, beats: Sequence[Beat]) -> dict[str, Any] | None:
    """Return the seconds of a recent step by what they went to, as the ranks report it; the mean over ranks.

    >>> breakdown({"late_s": 0.10}, [Beat(0, "a", 9, 0.0, own_s=0.05, data_s=0.01), Beat(1, "a", 9, 0.0, 0.07, 0.03)])
    {'step_s': 0.1, 'data_s': 0.02, 'own_s': 0.04, 'rest_s': 0.04, 'phases': {}}
    """
    if times is None or not beats:
        return None
    data_s, own_s = fmean(beat.data_s for beat in beats), fmean(beat.own_s for beat in beats)
    step_s = max(times["late_s"], own_s)
    return {
        "step_s": _six_digits(step_s),
        "data_s": _six_digits(data_s),
        "own_s": _six_digits(own_s - data_s),
        "rest_s": _six_digits(step_s - own_s),
        "phases": _phase_means(beats),
    }


def _phase_means(beats: Sequence[Beat]) -> dict[str, float]:
    """Return the mean of each phase and of waiting; empty unless all ranks report phases."""
    if not all(beat.phases for beat in beats):
        return {}
    means = {}
    for phase in (*PHASES, WAIT):
        means[phase] = _six_digits(fmean(beat.phases.get(phase, NO_TIME).mean_s for beat in beats))
    return means


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def median_or_one(values: Sequence[float]) -> float:
    """Return the median, or 1 where that is 0: a number to divide by."""
    return median(values) if values and median(values) > 0 else 1.0


def histogram(runs: Sequence[Run]) -> Html:
    """Return the distributions of step times, all runs on one scale."""
    known = [run for run in runs if run["step_time"]]
    if not known:
        return NOTHING
    left = min(run["step_time"]["edges_s"][0] for run in known)
    right = max(run["step_time"]["edges_s"][-1] for run in known)

    def x(value: float) -> float:
        return float(SIZE * (value - left) / (right - left))

    shapes, keys = [], []
    for run in known:
        outline, color = _outline(run["step_time"], x), f"c{run['color']}"
        shapes += [tag("path", class_=f"{kind} {color}", d=outline) for kind in ("fill", "line")]
        keys.append(key(color, run["name"]))
    ticks = linear_ticks(left, right, 4)
    labels = [axis_label("x", x(value), label(value * 1000)) for value in ticks]
    titles = axis_titles("step time in ms", "frequency")
    area = tag("div", picture("step times", *shapes), *labels, *titles, class_="area")
    legend = tag("span", *keys, class_="legend") if len(runs) > 1 else NOTHING
    head = tag("figcaption", tag("h3", "Step time"), legend)
    note = tag("p", _NOTE, class_="note")
    return tag("figure", head, tag("div", area, class_="plot"), note, class_="chart")


def _outline(times: Run, x: Callable[[float], float]) -> str:
    edges, counts = times["edges_s"], times["counts"]
    highest = max(counts) * 1.04
    corners = [(x(edges[0]), float(SIZE))]
    for place, count in enumerate(counts):
        height = SIZE * (1 - count / highest)
        corners += [(x(edges[place]), height), (x(edges[place + 1]), height)]
    return path([[*corners, (x(edges[-1]), float(SIZE))]])


def breakdowns(runs: Sequence[Run]) -> Html:
    """Return one bar per run: the parts of a step's time."""
    known = [(run["name"], _parts(run["breakdown"])) for run in runs if run["breakdown"]]
    if not known:
        return NOTHING
    several = len(runs) > 1
    rows = [_breakdown(name if several else "", parts) for name, parts in known]
    unit = tag("span", "recent steps, mean over ranks", class_="unit")
    head = tag("figcaption", tag("h3", "Where a step's time goes"), unit)
    kinds = dict.fromkeys(kind for _, parts in known for kind in parts)
    below = legend_of(list(kinds)) if several else NOTHING
    return tag("figure", head, *rows, below, class_="chart")


def _parts(times: Run) -> dict[str, float]:
    return dict(times["phases"]) or {kind: times[name] for name, kind in _WITHOUT_PHASES.items()}


def _breakdown(name: str, parts: Mapping[str, float]) -> Html:
    step_s = max(sum(parts.values()), 1e-12)
    shares, texts = {}, []
    for kind, seconds in parts.items():
        shares[kind] = seconds / step_s
        texts.append(f"{name_of(kind)}  {short_time(seconds)}, {seconds / step_s:.0%}")
    return bar(name or f"{short_time(step_s)} per step", shares, texts, explained=not name)


def name_of(kind: str) -> str:
    """Return what a kind of time is called on the page."""
    return _NAMES.get(kind, kind.replace("_", " "))


def bar(name: str, shares: Mapping[str, float], texts: Sequence[str], *, explained: bool) -> Html:
    """Return a bar of parts; an explained one has the text of each part below it."""
    pieces, values = [], []
    for (kind, share), text in zip(shares.items(), texts, strict=True):
        if share >= _NARROWEST:
            width = f"width:{min(1.0, share):.2%}"
            pieces.append(tag("i", class_=color_of(kind), style=width, title=text))
        values.append(tag("span", tag("i", class_=f"key {color_of(kind)}"), text))
    return tag(
        "div",
        tag("div", name, class_="bar-name") if name else NOTHING,
        tag("div", *pieces, class_="bar"),
        tag("div", *values, class_="said") if explained else NOTHING,
        class_=None if explained else "slim",
    )


def legend_of(kinds: Sequence[str]) -> Html:
    """Return the legend of several bars."""
    return tag("p", *(key(color_of(kind), name_of(kind)) for kind in kinds), class_="legend")


def color_of(kind: str) -> str:
    """Return the color of a kind of time, as a class."""
    return f"p{_COLORS[kind]}"
