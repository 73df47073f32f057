"""Memory and utilization of CPUs and GPUs over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.plot.line import Curve, Line, Number
from paceline.plot.markup import Html
from paceline.plot.page import Axes, Charts
from paceline.telemetry.rank_times import downsample, read_samples
from paceline.telemetry.usage import USAGE
from paceline.units import human_size

_POINTS = 240
_GB = 1e9
_CHARTS = (
    ("gpu_busy", "GPU utilization", "% of the time", 0.01),
    ("gpu_bytes", "GPU memory", "GB reserved per rank", _GB),
    ("cpu_cores", "CPU use", "cores per rank", 1.0),
    ("memory_bytes", "Process memory", "GB per rank", _GB),
)
_SPREAD = "mean and range of all ranks"

Run = Mapping[str, Any]


def usage_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return a curve for each kind of usage: the mean of all ranks, the lowest and the highest."""
    samples = downsample(read_samples(path), _POINTS)
    curves = {}
    for name in USAGE:
        known = [(sample.step, *sample.usage[name]) for sample in samples if name in sample.usage]
        if known:
            steps, mean, low, high = (list(map(float, part)) for part in zip(*known, strict=True))
            curves[name] = Curve(steps, [*mean], [*low], [*high], 0).as_dict()
    return curves


def usage_charts(runs: Sequence[Run], charts: Charts) -> list[Html]:
    """Return a chart for each kind of usage that was recorded."""
    shown = []
    for name, title, unit, one in _CHARTS:
        lines = []
        for number, run in enumerate(runs):
            if name in run["usage"]:
                curve = _scaled(Curve(**run["usage"][name]), one)
                lines.append(Line(run["name"], run["color"], curve, noisy=True, clock=number))
        several = any(run["world_size"] > 1 for run in runs)
        shown.append(charts.add(title, _SPREAD if several else "", lines, axes=Axes(y=unit)))
    return shown


def _scaled(curve: Curve, one: float) -> Curve:
    def scale(values: Sequence[Number]) -> list[Number]:
        return [None if value is None else float(f"{value / one:.6g}") for value in values]

    return Curve(curve.steps, scale(curve.mean), scale(curve.low), scale(curve.high), 0)


def peak(run: Run, name: str) -> str:
    """Return the highest value of a rank as text; empty if it is unknown."""
    curve = run["usage"].get(name)
    return human_size(max(curve["high"])) if curve else ""
