"""The results of `paceline bench` as an HTML page in the design of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.measure.bench_results import (
    BenchResults,
    Measurement,
    Row,
    bandwidth_lines,
    binary_size,
)
from paceline.measure.bench_table import describe_check, describe_fit
from paceline.plot.document import document, section
from paceline.plot.line import LIGHT, Curve, Line
from paceline.plot.markup import Html, table, tag
from paceline.plot.page import Axes, Charts
from paceline.units import short_time
from paceline.version import VERSION

_HEAD = ["size", "time", "fastest", "slowest", "algbw GB/s", "busbw GB/s"]
_TERMS = (
    "Bus bandwidth is size / time times the bus factor of the operation, as nccl-tests defines it. "
    "Error bars: the slowest and the fastest round. Times are medians over rounds on the slowest rank."
)


def to_html(measurement: Measurement, results: Sequence[BenchResults]) -> bytes:
    """Return one self-contained page: the check, bandwidth and time by size with both axes logarithmic, and tables."""
    charts = Charts()
    time = Axes("message size", "time in ms", log_x=True, log_y=True, x_label=_size)
    bandwidth = replace(time, y="bus bandwidth in GB/s")
    shown = [
        charts.add("Bus bandwidth", "", bandwidth_lines(results), axes=bandwidth),
        charts.add("Time of a message", "", _time_lines(results), axes=time),
    ]
    tables = [_table(result) for result in results]
    parts = [
        tag("section", _card(measurement), class_="cards"),
        section("By size", *shown, tag("p", _TERMS, class_="note")),
        section("Operations", *tables),
        tag("footer", f"made by paceline {VERSION}"),
    ]
    return document("Collectives", charts, *parts)


def _size(size: float) -> str:
    return binary_size(int(size))


def _card(measurement: Measurement) -> Html:
    facts = [
        ("ranks", f"{measurement.ranks} on {measurement.nodes} node{'s'[: measurement.nodes > 1]}"),
        ("device", measurement.gpu or measurement.device),
        ("backend", f"{measurement.backend}, torch {measurement.torch}"),
    ]
    check = describe_check(measurement).splitlines()
    lead = tag("p", f"{check[0][0].upper()}{check[0][1:]}.", class_="verdict")
    more = [tag("p", line, class_="reason") for line in check[1:]]
    pairs = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts]
    return tag("article", lead, *more, tag("dl", *pairs), class_="card")


def _time_lines(results: Sequence[BenchResults]) -> list[Line]:
    lines = []
    for place, result in enumerate(results):
        rows = result.rows
        curve = Curve(
            [float(row.size_bytes) for row in rows],
            [row.seconds * 1000 for row in rows],
            [row.fastest_s * 1000 for row in rows],
            [row.slowest_s * 1000 for row in rows],
            0,
        )
        lines.append(Line(result.operation, place % len(LIGHT), curve, error_bars=True))
    return lines


def _table(result: BenchResults) -> Html:
    rows = [
        tag("tr", *(tag("td", cell, class_="n") for cell in _cells(row))) for row in result.rows
    ]
    head = tag("figcaption", tag("h3", result.operation))
    fit = tag("p", describe_fit(result), class_="note")
    return tag("figure", head, table(_HEAD, rows, "plain figures"), fit, class_="chart")


def _cells(row: Row) -> list[str]:
    times = [short_time(seconds) for seconds in (row.seconds, row.fastest_s, row.slowest_s)]
    bandwidths = [f"{value:.3g}" for value in (row.algbw_gb_per_s, row.busbw_gb_per_s)]
    return [binary_size(row.size_bytes), *times, *bandwidths]
