"""Sizes, times and losses as short text."""

from __future__ import annotations


def human_size(size_bytes: float) -> str:
    """Return a size in decimal units.

    >>> human_size(90), human_size(14_401_560), human_size(999_999), human_size(3.2e13)
    ('90 B', '14.4 MB', '1.0 MB', '32.0 TB')
    """
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size_bytes /= 1000
        if size_bytes < 999.95:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1000:.1f} TB"


def human_time(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> [human_time(s) for s in (0.2, 59, 200, 7500, 100_000, -3)]
    ['0 s', '59 s', '3 min 20 s', '2 h 05 min', '1 d 3 h', '0 s']
    """
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def short_time(seconds: float) -> str:
    """Return a short duration, such as a step time, with three digits.

    >>> [short_time(s) for s in (0.00042, 0.0314, 2.5, 75)]
    ['0.42 ms', '31.4 ms', '2.50 s', '75.0 s']
    """
    if seconds < 1:
        return f"{seconds * 1000:.{2 if seconds < 0.01 else 1}f} ms"
    return f"{seconds:.{2 if seconds < 10 else 1}f} s"


def human_loss(loss: float) -> str:
    """Return a loss with the digits that matter.

    >>> [human_loss(loss) for loss in (2.30258, 0.01234, 0.000123456, 12345.678)]
    ['2.3026', '0.0123', '0.000123', '12,346']
    """
    if abs(loss) >= 10_000:
        return f"{loss:,.0f}"
    return f"{loss:.4f}" if abs(loss) >= 0.01 or not loss else f"{loss:.3g}"
