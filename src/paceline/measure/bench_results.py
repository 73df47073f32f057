"""What the times of a bench amount to: medians, bandwidths by the definitions of nccl-tests, a fit, and whether all was right."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.measure.bench_fit import Fit, fit_line
from paceline.measure.bench_plan import BUS_FACTORS
from paceline.units import human_size

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Timing:
    """One operation at one size: the seconds of a message, by round, on the slowest rank."""

    operation: str
    size_bytes: int
    messages: int
    """Messages of one round, back to back."""
    seconds: list[float]


@dataclass(frozen=True)
class Mistake:
    """A result that was not what it must be."""

    operation: str
    size_bytes: int
    rank: int
    element: int
    right: float
    found: float
    """Not a number: nothing was written there."""


@dataclass(frozen=True)
class Measurement:
    """All that the ranks of a world found out."""

    ranks: int
    nodes: int
    device: str
    gpu: str
    backend: str
    torch: str
    measured: list[Timing]
    checked: int
    """Results that were looked at, on all ranks."""
    wrong: int
    mistakes: list[Mistake]
    """The first one of each rank that met any."""

    def as_json(self) -> str:
        """Return it as rank 0 writes it down."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Return what rank 0 wrote down."""
        found = json.loads(text)
        found["measured"] = [Timing(**each) for each in found["measured"]]
        found["mistakes"] = [Mistake(**each) for each in found["mistakes"]]
        return cls(**found)


@dataclass(frozen=True)
class Row:
    """The figures of one operation at one size."""

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
    """The figures of one operation."""

    operation: str
    bus_factor: float
    rows: list[Row]
    fit: Fit | None


def results_of(found: Measurement) -> list[BenchResults]:
    """Return the figures of every operation, in the order in which they were measured."""
    names = dict.fromkeys(each.operation for each in found.measured)
    return [
        _figures(name, found.ranks, [each for each in found.measured if each.operation == name])
        for name in names
    ]


def _figures(name: str, ranks: int, measured: Sequence[Timing]) -> BenchResults:
    factor = BUS_FACTORS[name](ranks)
    rows = {
        each.size_bytes: _row(each, factor) for each in measured
    }  # two sizes may have become one
    fit = fit_line(
        [row.size_bytes for row in rows.values()], [row.seconds for row in rows.values()]
    )
    return BenchResults(name, factor, list(rows.values()), fit)


def _row(each: Timing, factor: float) -> Row:
    seconds = statistics.median(each.seconds)
    algbw = each.size_bytes / seconds / 1e9
    return Row(
        each.size_bytes,
        seconds,
        min(each.seconds),
        max(each.seconds),
        len(each.seconds),
        each.messages,
        algbw,
        algbw * factor,
    )


def as_dict(found: Measurement, figures: Sequence[BenchResults], svg: str) -> dict[str, Any]:
    """Return everything as plain values; docs/bench.md says what each is."""
    facts = ("ranks", "nodes", "device", "gpu", "backend", "torch", "checked", "wrong")
    return {
        "right": not found.wrong,
        **{name: getattr(found, name) for name in facts},
        "mistakes": [asdict(each) | {"found": _plain(each.found)} for each in found.mistakes],
        "operations": [_operation_as_dict(each) for each in figures],
        "svg": svg,
    }


def _operation_as_dict(figures: BenchResults) -> dict[str, Any]:
    rows = [asdict(row) for row in figures.rows]
    head = {
        "operation": figures.operation,
        "bus_factor": figures.bus_factor,
        "sizes": rows,
        "fit": None,
    }
    if figures.fit:
        fit = asdict(figures.fit) | {"bytes_per_s": _plain(figures.fit.bytes_per_s)}
        head["fit"] = fit | {
            "bus_bytes_per_s": _plain(figures.fit.bytes_per_s * figures.bus_factor)
        }
    return head


def _plain(number: float) -> float | None:
    """Return a number that JSON knows."""
    return number if math.isfinite(number) else None


def describe(found: Measurement, figures: Sequence[BenchResults]) -> str:
    """Return the figures as a table, with a bar for each bus bandwidth."""
    where = f"{found.ranks} rank{'s' if found.ranks > 1 else ''} on {found.nodes} node{'s' if found.nodes > 1 else ''}"
    lines = [f"{where}, {found.gpu or found.device}, {found.backend}, torch {found.torch}", ""]
    most = max((row.busbw_gb_per_s for each in figures for row in each.rows), default=0.0)
    for each in figures:
        lines += [_line(each.operation, "time", "fastest", "slowest", "algbw", "busbw", " GB/s")]
        lines += [_line_of(row, most) for row in each.rows]
        lines += [f"  {_describe_fit(each)}", ""]
    if found.ranks == 1:
        lines += [
            "one rank: nothing crosses, so bus bandwidths are 0 and there is no pair; -n 2 measures more",
            "",
        ]
    return "\n".join([*lines, _describe_check(found)])


def _line_of(row: Row, most: float) -> str:
    times = [_microseconds(seconds) for seconds in (row.seconds, row.fastest_s, row.slowest_s)]
    bandwidths = [f"{value:.3g}" for value in (row.algbw_gb_per_s, row.busbw_gb_per_s)]
    return _line(
        binary_size(row.size_bytes), *times, *bandwidths, " " + bar(row.busbw_gb_per_s, most)
    ).rstrip()


def _line(name: str, *columns: str) -> str:
    *numbers, last = columns
    return f"{name:<15}" + "".join(f"{column:>11}" for column in numbers) + last


def binary_size(size_bytes: int) -> str:
    """Return a size in the words in which it can be given.

    >>> binary_size(1024), binary_size(4 << 20), binary_size(1000), binary_size(1 << 30)
    ('1 KiB', '4 MiB', '1.0 kB', '1 GiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power} {unit}"
    return human_size(size_bytes)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def bar(value: float, most: float) -> str:
    """Return a bar of letters, an eighth of a letter fine.

    >>> bar(1, 2), bar(0, 0)
    ('████████████', '')
    """
    eighths = round(8 * _BAR * value / most) if most else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _describe_fit(figures: BenchResults) -> str:
    fit = figures.fit
    if fit is None:
        return "no fit: it takes two sizes"
    rate = (
        "no bandwidth shows" if math.isinf(fit.bytes_per_s) else f"{fit.bytes_per_s / 1e9:.3g} GB/s"
    )
    bus = (
        f" (bus {fit.bytes_per_s * figures.bus_factor / 1e9:.3g})"
        if math.isfinite(fit.bytes_per_s)
        else ""
    )
    away = f"typically {fit.typical_deviation:.0%} off, at most {fit.largest_deviation:.0%}"
    return f"fit: {_microseconds(fit.latency_s)} + size / {rate}{bus}; {away}"


def _describe_check(found: Measurement) -> str:
    if not found.wrong:
        return f"all {found.checked:,} results were right"
    lines = [f"WRONG: {found.wrong:,} of {found.checked:,} results"]
    for each in found.mistakes:
        got = "nothing" if math.isnan(each.found) else f"{each.found:g}"
        where = f"  rank {each.rank}: {each.operation} of {binary_size(each.size_bytes)}, number {each.element}"
        lines.append(f"{where}: {got} instead of {each.right:g}")
    return "\n".join(lines)
