"""The results of `paceline bench` on a terminal: a table per operation, the fit, and the check."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.measure.bench_results import BenchResults, Measurement, Row, binary_size
from paceline.terminal import drawn, say, table

_BAR = 24
_COLUMNS = ("time", "fastest", "slowest", "algbw GB/s", "busbw GB/s")
_BARS = ""  # the name of the last column
_DROPPABLE = (_BARS, "slowest", "fastest", "algbw GB/s")


def print_results(measurement: Measurement, results: Sequence[BenchResults]) -> None:
    """Print all results; a narrow terminal shows fewer columns."""
    ranks, nodes = _count(measurement.ranks, "rank"), _count(measurement.nodes, "node")
    hardware = measurement.gpu or measurement.device
    say(f"{ranks} on {nodes}, {hardware}, {measurement.backend}, torch {measurement.torch}")
    highest = max((row.busbw_gb_per_s for result in results for row in result.rows), default=0.0)
    for result in results:
        say()
        head = (f"{result.operation:<14}", *_COLUMNS, _BARS)
        rows = [_cells(row, highest) for row in result.rows]
        table(head, rows, droppable=_DROPPABLE, numeric=_COLUMNS)
        say(f"  {describe_fit(result)}")
    say()
    if measurement.ranks == 1:
        say("1 rank: nothing is sent, so bus bandwidths are 0; use -n 2 to measure the link")
    say(describe_check(measurement))


def _cells(row: Row, highest: float) -> list[str]:
    times = [_microseconds(seconds) for seconds in (row.seconds, row.fastest_s, row.slowest_s)]
    bandwidths = [f"{value:.3g}" for value in (row.algbw_gb_per_s, row.busbw_gb_per_s)]
    return [binary_size(row.size_bytes), *times, *bandwidths, _bar(row.busbw_gb_per_s, highest)]


def _bar(value: float, highest: float) -> str:
    from rich.bar import Bar

    return drawn(Bar(highest, 0, value, width=_BAR), _BAR)[0] if highest else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def describe_fit(result: BenchResults) -> str:
    """Return latency and bandwidth of the fitted line, and how far the times are from it."""
    fit = result.fit
    if fit is None:
        return "no fit: it needs two sizes"
    if math.isinf(fit.bytes_per_s):
        line = f"{_microseconds(fit.latency_s)}, independent of the size"
    else:
        rate, bus_rate = fit.bytes_per_s / 1e9, fit.bytes_per_s * result.bus_factor / 1e9
        line = f"{_microseconds(fit.latency_s)} + size / {rate:.3g} GB/s (bus {bus_rate:.3g})"
    typical, worst = 100 * fit.typical_deviation, 100 * fit.largest_deviation
    return f"fit: {line}; fit error: median {typical:.0f} %, worst {worst:.0f} %"


def describe_check(measurement: Measurement) -> str:
    """Return how many results were correct, and the first wrong number of each rank."""
    if not measurement.wrong:
        return f"all {measurement.checked:,} results were correct"
    lines = [f"WRONG: {measurement.wrong:,} of {measurement.checked:,} results"]
    for mistake in measurement.mistakes:
        value = "nothing" if math.isnan(mistake.found) else f"{mistake.found:g}"
        where = f"{mistake.operation} of {binary_size(mistake.size_bytes)}"
        lines.append(
            f"  rank {mistake.rank}: {where}, element {mistake.element}: "
            f"got {value}, expected {mistake.right:g}"
        )
    return "\n".join(lines)
