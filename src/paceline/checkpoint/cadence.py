"""When the next checkpoint is due, and how long a save may take.

Free of torch and I/O, so that its arithmetic is tested by tables.
"""

from __future__ import annotations

import math

from paceline.config.intervals import Every

_SLOW_DISK_BYTES_PER_S = 50e6
_FIRST_S = 30.0  # auto: time of the first save, before any cost was measured


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval that loses the least time to saves and to work repeated after failures.

    >>> young_daly_s(cost_s=2.0, mtbf_s=86400.0)
    587.8775382679628
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def slow_disk_s(size_bytes: float) -> float:
    """Return the seconds in which even a slow disk writes this many bytes.

    >>> slow_disk_s(100e6)
    2.0
    """
    return size_bytes / _SLOW_DISK_BYTES_PER_S


class Cadence:
    """Saves after certain steps, which every rank knows, or after a time, which rank 0 measures for all."""

    def __init__(self, every: Every, mtbf_s: float, steps_per_epoch: int, now_s: float) -> None:
        steps_per_unit = {"steps": 1, "epochs": steps_per_epoch}
        seconds = {"seconds": every.amount, "auto": _FIRST_S}
        self._mtbf_s = mtbf_s
        self._steps = steps_per_unit.get(every.unit, 0) * int(every.amount)
        self._measured = every.unit == "auto"
        self.interval_s = seconds.get(every.unit, math.inf)
        self._last_s = now_s

    def due_after(self, step: int) -> bool:
        """Return whether the step number alone makes a checkpoint due."""
        return bool(self._steps) and step % self._steps == 0

    def due_at(self, now_s: float) -> bool:
        """Return whether the interval since the last save has passed."""
        return now_s - self._last_s >= self.interval_s

    def begun(self, now_s: float) -> None:
        """Measure the next interval from a save that begins now."""
        self._last_s = now_s

    def learn(self, held_s: float, total_s: float) -> None:
        """Adapt an automatic interval to the cost of a save: the blocked time, and the whole time of the write."""
        if self._measured:
            self.interval_s = max(young_daly_s(held_s, self._mtbf_s), 2.0 * total_s, 1.0)
