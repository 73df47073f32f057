"""How long a step takes, how that varies, and what it is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy

from paceline.report.history import as_number
from paceline.report.page.event_columns import EventColumns
from paceline.telemetry.heartbeat import NOTHING, Beat
from paceline.telemetry.phases import PHASES, WAIT

_BARS = 40
_LATE = 20  # step events that tell how long a step takes by now


def pace(account: EventColumns) -> dict[str, Any] | None:
    """Return the distribution of step times. Each value is the mean of the steps between two step events.

    The last bar also holds what took longer than 99 % did.
    """
    batch = as_number(account.started.get("global_batch"))
    rates = numpy.frombuffer(account.steps["samples_per_s"], dtype=float)
    rates = rates[numpy.isfinite(rates) & (rates > 0)]
    if not rates.size or not batch > 0:
        return None
    times = batch / rates
    low, middle, high, longest = (
        float(value) for value in numpy.quantile(times, [0.05, 0.5, 0.95, 0.99])
    )
    edges = numpy.linspace(times.min(), max(longest, times.min() * 1.01), _BARS + 1)
    counts, _ = numpy.histogram(numpy.minimum(times, edges[-1]), edges)
    return {
        "samples_per_s": float(numpy.median(rates)),
        "median_s": middle,
        "p5_s": low,
        "p95_s": high,
        "late_s": float(numpy.median(times[-_LATE:])),
        "edges_s": [float(f"{edge:.6g}") for edge in edges],
        "counts": [int(count) for count in counts],
    }


def breakdown(times: dict[str, Any] | None, beats: Sequence[Beat]) -> dict[str, Any] | None:
    """Return what a step of late was spent on, in seconds, by what the ranks say of themselves; the mean over ranks.

    >>> breakdown({"late_s": 0.10}, [Beat(0, "a", 9, 0.0, own_s=0.05, data_s=0.01), Beat(1, "a", 9, 0.0, 0.07, 0.03)])
    {'step_s': 0.1, 'data_s': 0.02, 'own_s': 0.04, 'rest_s': 0.04, 'phases': {}}
    """
    if times is None or not beats:
        return None
    data_s, own_s = fmean(beat.data_s for beat in beats), fmean(beat.own_s for beat in beats)
    step_s = max(times["late_s"], own_s)
    parts = {"step_s": step_s, "data_s": data_s, "own_s": own_s - data_s, "rest_s": step_s - own_s}
    return {name: _short(value) for name, value in parts.items()} | {"phases": _phases(beats)}


def _phases(beats: Sequence[Beat]) -> dict[str, float]:
    """Return what each phase took, and the waiting; nothing if not all ranks tell."""
    if not all(beat.phases for beat in beats):
        return {}
    return {phase: _short(fmean(_mean(beat, phase) for beat in beats)) for phase in (*PHASES, WAIT)}


def _mean(beat: Beat, phase: str) -> float:
    return beat.phases.get(phase, NOTHING).mean_s


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def usual(values: Sequence[float]) -> float:
    """Return the median, and something to divide by where that is 0."""
    return median(values) if values and median(values) > 0 else 1.0
