"""Where the lines of a scale stand, and what is written at them."""

from __future__ import annotations

import math
from collections.abc import Sequence

_NICE = (1.0, 2.0, 5.0, 10.0)
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


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
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within a range, with 2 and 5 between where they are few.

    >>> log_ticks(0.5, 200), log_ticks(1e-6, 1e6), log_ticks(3, 4)
    ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0], [1e-06, 0.0001, 0.01, 1.0, 100.0, 10000.0, 1000000.0], [3.0, 3.2, 3.4, 3.6, 3.8, 4.0])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1.0, 2.0, 5.0) if last - first <= 4 else (1.0,)
    every = max(1, math.ceil((last - first) / 8))
    found = [
        float(f"{factor}e{power}") for power in range(first, last + 1, every) for factor in factors
    ]
    inside = [value for value in found if low * 0.999 <= value <= high * 1.001]
    return inside if len(inside) > 1 else linear_ticks(low, high)


def label(value: float) -> str:
    """Return a number as short as it can be told.

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
    """Return round moments from 0 on.

    >>> time_ticks(50), time_ticks(7200)
    ([0, 10, 20, 30, 40, 50], [0, 1800, 3600, 5400, 7200])
    """
    steps = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next(
        (step for step in steps if step * about >= seconds),
        86400 * math.ceil(seconds / about / 86400),
    )
    return [place * step for place in range(int(seconds // step) + 1)]


def time_label(seconds: float) -> str:
    """Return a moment, counted from the start.

    >>> [time_label(s) for s in (0, 30, 600, 5400, 90_000, 0.5)]
    ['0', '30 s', '10 min', '1:30 h', '1 d 1 h', '0.5 s']
    """
    if seconds < 60:
        return f"{seconds:g} s" if seconds else "0"
    if seconds < 3600:
        return f"{seconds / 60:g} min"
    if seconds < 86400:
        return (
            f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
            if seconds % 3600
            else f"{seconds // 3600:.0f} h"
        )
    return f"{seconds // 86400:.0f} d" + (
        f" {seconds % 86400 // 3600:.0f} h" if seconds % 86400 else ""
    )


def span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of a linear scale: from 0 where that is near, with some air elsewhere.

    >>> span([1, 10]), span([90, 100]), span([5, 5]), span([0, 0])
    ((0.0, 10.4), (89.6, 100.4), (4.5, 5.5), (0.0, 1.0))
    """
    low, high = min(values), max(values)
    if high == low:
        return (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    air = (high - low) * 0.04
    from_zero = 0 <= low < 0.35 * high
    return (0.0, float(f"{high + 0.04 * high:.6g}")) if from_zero else (low - air, high + air)
