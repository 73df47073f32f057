"""Memory and processors in use by this rank: a few cheap readings per heartbeat, outside the training's thread."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

USAGE = ("memory_bytes", "cpu_cores", "gpu_bytes", "gpu_peak_bytes", "gpu_busy")
"""Resident memory of the process; CPU cores in use; memory that torch has reserved on the GPU; the most it has allocated;
the share of time in which the GPU runs kernels (of all its processes)."""

_RESIDENT_PAGES = Path("/proc/self/statm")

Spread = tuple[float, float, float]
"""Mean, lowest and highest value of all ranks."""


class UsageMeter:
    """Reads what the process uses; values that this machine does not offer are left out."""

    def __init__(self, gpu: Callable[[], Mapping[str, float]] = dict) -> None:
        """Add the readings of a function for the GPU."""
        self._gpu = gpu
        self._cpu_s, self._at = time.process_time(), time.perf_counter()

    def sample(self) -> dict[str, float]:
        """Return values by the names in USAGE; the cores are those in use since the last sample."""
        cpu_s, now = time.process_time(), time.perf_counter()
        found = {"cpu_cores": (cpu_s - self._cpu_s) / max(1e-6, now - self._at)}
        self._cpu_s, self._at = cpu_s, now
        with contextlib.suppress(OSError, ValueError, IndexError):  # no Linux
            pages = int(_RESIDENT_PAGES.read_bytes().split()[1])
            found["memory_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
        with contextlib.suppress(Exception):  # a driver's problem must not end the heartbeat
            found |= self._gpu()
        return {name: float(f"{found[name]:.4g}") for name in USAGE if name in found}


def spread_over(samples: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    """Return mean, lowest and highest value of each kind over all ranks that have it.

    >>> spread_over([{"cpu_cores": 1.0}, {"cpu_cores": 3.0}, {}])
    {'cpu_cores': (2.0, 1.0, 3.0)}
    """
    by_name: dict[str, list[float]] = {}
    for sample in samples:
        for name in USAGE:
            if name in sample:
                by_name.setdefault(name, []).append(sample[name])
    return {name: (_mean(values), min(values), max(values)) for name, values in by_name.items()}


def merge_spreads(group: Iterable[Mapping[str, Spread]]) -> dict[str, Spread]:
    """Return one spread per kind that stands for several moments.

    >>> merge_spreads([{"cpu_cores": (2.0, 1.0, 3.0)}, {"cpu_cores": (4.0, 4.0, 4.0)}])
    {'cpu_cores': (3.0, 1.0, 4.0)}
    """
    by_name: dict[str, list[Spread]] = {}
    for spreads in group:
        for name, spread in spreads.items():
            by_name.setdefault(name, []).append(spread)
    merged = {}
    for name, spreads_ in by_name.items():
        means, lows, highs = zip(*spreads_, strict=True)
        merged[name] = (_mean(means), min(lows), max(highs))
    return merged


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return float(f"{sum(known) / len(known):.4g}")
