"""From the times of `paceline bench` to results: medians, bandwidths as nccl-tests defines them, and a fit."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.measure.bench_fit import Fit, fit_line
from paceline.measure.bench_plan import BUS_FACTORS
from paceline.plot.line import LIGHT, Curve, Line
from paceline.plot.svg_file import Plot, to_svg
from paceline.units import human_size

_IN_JSON = ("ranks", "nodes", "device", "gpu", "backend", "torch", "checked", "wrong")


@dataclass(frozen=True)
class Timing:
    """One operation at one size: the seconds of a message on the slowest rank, by round."""

    operation: str
    size_bytes: int
    messages: int
    """Messages per round, back to back."""
    seconds: list[float]


@dataclass(frozen=True)
class Mistake:
    """A wrong number in the result of a collective."""

    operation: str
    size_bytes: int
    rank: int
    element: int
    right: float
    found: float
    """NaN: nothing was written there."""


@dataclass(frozen=True)
class Measurement:
    """Everything that the ranks of a world measured."""

    ranks: int
    nodes: int
    device: str
    gpu: str
    backend: str
    torch: str
    measured: list[Timing]
    checked: int
    """Results that were checked, on all ranks."""
    wrong: int
    mistakes: list[Mistake]
    """The first one of each rank that has any."""

    def as_json(self) -> str:
        """Return the text that rank 0 writes for the launching process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Return what rank 0 has written."""
        content = json.loads(text)
        content["measured"] = [Timing(**timing) for timing in content["measured"]]
        content["mistakes"] = [Mistake(**mistake) for mistake in content["mistakes"]]
        return cls(**content)


@dataclass(frozen=True)
class Row:
    """The results of one operation at one size."""

    size_bytes: int
    seconds: float
    """Median over rounds."""
    fastest_s: float
    slowest_s: float
    rounds: int
    messages: int
    algbw_gb_per_s: float
    busbw_gb_per_s: float


@dataclass(frozen=True)
class BenchResults:
    """The results of one operation."""

    operation: str
    bus_factor: float
    rows: list[Row]
    fit: Fit | None


def results_of(measurement: Measurement) -> list[BenchResults]:
    """Return the results by operation, in the order of measurement."""
    by_operation: dict[str, list[Timing]] = {}
    for timing in measurement.measured:
        by_operation.setdefault(timing.operation, []).append(timing)
    results = []
    for name, timings in by_operation.items():
        factor = BUS_FACTORS[name](measurement.ranks)
        rows = {timing.size_bytes: _row(timing, factor) for timing in timings}
        results.append(_results(name, factor, list(rows.values())))
    return results


def _results(name: str, factor: float, rows: list[Row]) -> BenchResults:
    fit = fit_line([row.size_bytes for row in rows], [row.seconds for row in rows])
    return BenchResults(name, factor, rows, fit)


def _row(timing: Timing, factor: float) -> Row:
    seconds = statistics.median(timing.seconds)
    algbw = timing.size_bytes / seconds / 1e9
    return Row(
        timing.size_bytes,
        seconds,
        fastest_s=min(timing.seconds),
        slowest_s=max(timing.seconds),
        rounds=len(timing.seconds),
        messages=timing.messages,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * factor,
    )


def as_dict(measurement: Measurement, results: Sequence[BenchResults], svg: str) -> dict[str, Any]:
    """Return everything with the keys of docs/bench.md."""
    mistakes = [
        asdict(mistake) | {"found": _or_none(mistake.found)} for mistake in measurement.mistakes
    ]
    return {
        "right": not measurement.wrong,
        **{name: getattr(measurement, name) for name in _IN_JSON},
        "mistakes": mistakes,
        "operations": [_operation_as_dict(result) for result in results],
        "svg": svg,
    }


def _operation_as_dict(result: BenchResults) -> dict[str, Any]:
    fit = None
    if result.fit:
        rate = result.fit.bytes_per_s
        fit = asdict(result.fit) | {
            "bytes_per_s": _or_none(rate),
            "bus_bytes_per_s": _or_none(rate * result.bus_factor),
        }
    return {
        "operation": result.operation,
        "bus_factor": result.bus_factor,
        "sizes": [asdict(row) for row in result.rows],
        "fit": fit,
    }


def _or_none(number: float) -> float | None:
    """Return None for a number that JSON does not have."""
    return number if math.isfinite(number) else None


def bandwidth_lines(results: Sequence[BenchResults]) -> list[Line]:
    """Return bus bandwidth by message size, with that of the slowest and the fastest round."""
    lines = []
    for place, result in enumerate(results):
        rows = result.rows
        volumes = [row.size_bytes * result.bus_factor / 1e9 for row in rows]
        curve = Curve(
            [float(row.size_bytes) for row in rows],
            [row.busbw_gb_per_s for row in rows],
            [size / row.slowest_s for size, row in zip(volumes, rows, strict=True)],
            [size / row.fastest_s for size, row in zip(volumes, rows, strict=True)],
            0,
        )
        lines.append(Line(result.operation, place % len(LIGHT), curve, error_bars=True))
    return lines


def plot_of(measurement: Measurement, results: Sequence[BenchResults]) -> str:
    """Return bus bandwidth by message size as SVG, both axes logarithmic."""
    where = f"{measurement.ranks} ranks, {measurement.gpu or measurement.device}"
    title = f"bus bandwidth, {where}, {measurement.backend}"
    lines, x_label = bandwidth_lines(results), lambda size: binary_size(int(size))
    return to_svg(Plot(title, "message size", "GB/s", lines, x_label, log_y=True))


def binary_size(size_bytes: int) -> str:
    """Return a size in the unit in which `--sizes` takes it.

    >>> binary_size(1024), binary_size(4 << 20), binary_size(1000), binary_size(1 << 30)
    ('1 KiB', '4 MiB', '1.0 kB', '1 GiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power} {unit}"
    return human_size(size_bytes)
