"""When the next checkpoint is due."""

from __future__ import annotations

import math

from paceline.config.intervals import Every

_FIRST_S = 30.0  # auto: when to save first, as nothing has been measured yet


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval that loses least: saving more often costs more, less often loses more when something fails.

    >>> young_daly_s(cost_s=2.0, mtbf_s=86400.0)
    587.8775382679628
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


class Cadence:
    """When to save: at steps that every rank knows, or after a time that rank 0 measures for all."""

    def __init__(self, every: Every, mtbf_s: float, steps_per_epoch: int, now_s: float) -> None:
        self._mtbf_s = mtbf_s
        self._steps = {"steps": 1, "epochs": steps_per_epoch}.get(every.unit, 0) * int(every.amount)
        self._measured = every.unit == "auto"
        self.interval_s = {"seconds": every.amount, "auto": _FIRST_S}.get(every.unit, math.inf)
        self._last_s = now_s

    def due_after(self, step: int) -> bool:
        """Return whether the number of a step alone says that a checkpoint follows it."""
        return bool(self._steps) and step % self._steps == 0

    def due_at(self, now_s: float) -> bool:
        """Return whether it is time for a checkpoint."""
        return now_s - self._last_s >= self.interval_s

    def begun(self, now_s: float) -> None:
        """Count the time from a save that begins now."""
        self._last_s = now_s

    def learn(self, held_s: float, total_s: float) -> None:
        """Take what a save cost: the training is held for part of it, and the disk is busy for all of it."""
        if self._measured:
            self.interval_s = max(young_daly_s(held_s, self._mtbf_s), 2.0 * total_s, 1.0)
