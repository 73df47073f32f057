"""Fit latency and bandwidth to message times: t = a + n/b, robust against outliers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """The line with the smallest sum of relative deviations."""

    latency_s: float
    """The time of a message before its first byte."""
    bytes_per_s: float
    """Bandwidth; inf: the time does not depend on the size."""
    typical_deviation: float
    """Median deviation of a time from the line, as a share of the time."""
    largest_deviation: float

    def seconds(self, size_bytes: float) -> float:
        """Return the time of a message of this size on the line."""
        return self.latency_s + size_bytes / self.bytes_per_s


def fit_line(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """Return the best line through measured times, or None for fewer than two sizes.

    The sum of relative deviations has its minimum at a line through two of the points (or through one of them, with
    no latency or no slope), so all of these are tried. A third of the points may be outliers.

    >>> fit_line([1000, 10_000, 100_000, 1_000_000], [0.002, 0.011, 0.101, 9.0]).latency_s
    0.001
    """
    points = list(zip(sizes_bytes, seconds, strict=True))
    if len(set(sizes_bytes)) < 2:
        return None
    latency_s, slope = min(_candidates(points), key=lambda line: sum(_deviations(points, *line)))
    deviations = sorted(_deviations(points, latency_s, slope))
    bytes_per_s = 1 / slope if slope else math.inf
    return Fit(latency_s, bytes_per_s, deviations[len(deviations) // 2], deviations[-1])


Points = Sequence[tuple[float, float]]


def _candidates(points: Points) -> list[tuple[float, float]]:
    """Return (latency, seconds per byte) of every line through two points; neither may be negative."""
    lines = [(time_s, 0.0) for _, time_s in points]
    lines += [(0.0, time_s / size) for size, time_s in points if size]
    for (size, time_s), (larger, longer_s) in itertools.combinations(points, 2):
        if size != larger:
            slope = (longer_s - time_s) / (larger - size)
            lines.append((round(time_s - slope * size, 15), slope))
    return [(latency_s, slope) for latency_s, slope in lines if latency_s >= 0 and slope >= 0]


def _deviations(points: Points, latency_s: float, slope: float) -> list[float]:
    return [abs(time_s - latency_s - slope * size) / time_s for size, time_s in points]
