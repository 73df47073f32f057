"""The tick rule of all charts: which values an axis marks, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

_NICE = (1.0, 2.0, 5.0, 10.0)
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
_MARGIN = 0.04  # of the range, so that no line touches the edge
_NEAR_ZERO = 0.35  # smallest over largest value, below which an axis begins at 0
_ALL_FACTORS = 4  # decades up to which 2 and 5 are marked, too
_TIME_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers within a range.

    >>> linear_ticks(0, 10), linear_ticks(0.13, 0.58), linear_ticks(2, 2)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.2, 0.3, 0.4, 0.5], [2])
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(nice for nice in _NICE if nice * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_rounded(place * step) for place in range(first, last + 1)]


def ticks_from_zero(high: float) -> list[float]:
    """Return round numbers from 0 to the first one that is not below a value.

    >>> ticks_from_zero(0.7), ticks_from_zero(4), ticks_from_zero(0)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    ticks = linear_ticks(0, high if high > 0 else 1.0)
    if ticks[-1] < high * (1 - 1e-9):
        ticks.append(_rounded(ticks[-1] + ticks[1]))
    return ticks


def ticks_with_zero(low: float, high: float) -> list[float]:
    """Return round numbers that enclose a range and 0.

    >>> ticks_with_zero(1, 4), ticks_with_zero(-3, -1), ticks_with_zero(-0.5, 1.5)
    ([0.0, 1.0, 2.0, 3.0, 4.0], [-3.0, -2.0, -1.0, 0.0], [-0.5, 0.0, 0.5, 1.0, 1.5])
    """
    if low >= 0:
        return ticks_from_zero(high)
    ticks = linear_ticks(low, max(high, 0.0))
    step = ticks[1] - ticks[0]
    below = [_rounded(ticks[0] - step)] if ticks[0] > low * (1 - 1e-9) else []
    above = [_rounded(ticks[-1] + step)] if ticks[-1] < high * (1 - 1e-9) else []
    return [*below, *ticks, *above]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within a range; over a few decades, 2 and 5 times them, too.

    >>> log_ticks(0.5, 20), log_ticks(1e-6, 1e6), log_ticks(3, 4)
    ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0], [1e-06, 0.0001, 0.01, 1.0, 100.0, 10000.0, 1000000.0], [3.0, 3.2, 3.4, 3.6, 3.8, 4.0])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1.0, 2.0, 5.0) if last - first <= _ALL_FACTORS else (1.0,)
    every = max(1, math.ceil((last - first) / 8))
    ticks = []
    for power in range(first, last + 1, every):
        for factor in factors:
            value = float(f"{factor}e{power}")
            if low * 0.999 <= value <= high * 1.001:
                ticks.append(value)
    return ticks if len(ticks) > 1 else linear_ticks(low, high)


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def label(value: float) -> str:
    """Return a number in few characters.

    >>> [label(value) for value in (0, 0.25, 1200, 25_000, 1.5e6, 2e-5, -3)]
    ['0', '0.25', '1,200', '25k', '1.5M', '2e-5', '-3']
    """
    size = abs(value)
    for amount, suffix in _SUFFIXES:
        if size >= amount:
            return f"{value / amount if amount > 1e4 else value / 1e3:.4g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    if value and size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def time_ticks(seconds: float, about: int = 6) -> list[float]:
    """Return round times from 0 up to a duration.

    >>> time_ticks(50), time_ticks(7200)
    ([0, 10, 20, 30, 40, 50], [0, 1800, 3600, 5400, 7200])
    """
    days = 86400 * math.ceil(seconds / about / 86400)
    step = next((step for step in _TIME_STEPS if step * about >= seconds), days)
    return [place * step for place in range(int(seconds // step) + 1)]


def time_label(seconds: float) -> str:
    """Return a time since the start.

    >>> [time_label(s) for s in (0, 30, 600, 5400, 90_000, 0.5)]
    ['0', '30 s', '10 min', '1:30 h', '1 d 1 h', '0.5 s']
    """
    if seconds < 60:
        return f"{seconds:g} s" if seconds else "0"
    if seconds < 3600:
        return f"{seconds / 60:g} min"
    if seconds < 86400:
        hours, minutes = seconds // 3600, seconds % 3600 // 60
        return f"{hours:.0f}:{minutes:02.0f} h" if seconds % 3600 else f"{hours:.0f} h"
    days, hours = seconds // 86400, seconds % 86400 // 3600
    return f"{days:.0f} d {hours:.0f} h" if seconds % 86400 else f"{days:.0f} d"


def span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of a linear axis: from 0 if that is near, else with a margin.

    >>> span([1, 10]), span([90, 100]), span([5, 5]), span([0, 0])
    ((0.0, 10.4), (89.6, 100.4), (4.5, 5.5), (0.0, 1.0))
    """
    low, high = min(values), max(values)
    if high == low:
        return (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    if 0 <= low < _NEAR_ZERO * high:
        return 0.0, float(f"{high * (1 + _MARGIN):.6g}")
    margin = (high - low) * _MARGIN
    return low - margin, high + margin
