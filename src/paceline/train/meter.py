"""How well and how fast it went since a moment."""

from __future__ import annotations

import time

from paceline.train.step import OptimizerStep, StepResult


class Meter:
    """The mean loss and the speed since a moment."""

    def __init__(self) -> None:
        self._first = time.perf_counter()
        self.last = (0.0, 0.0)
        self.restart()

    def restart(self) -> None:
        """Start anew, now."""
        self._begun = time.perf_counter()
        self._loss_sum = self._count = 0.0
        self._samples = 0

    def add(self, result: StepResult, samples: int) -> None:
        """Take one step's result; `samples` are those of all ranks."""
        self.last = (result.loss_sum, result.count)
        self._loss_sum += result.loss_sum
        self._count += result.count
        self._samples += samples

    def close(self, take: OptimizerStep) -> tuple[float, float]:
        """Return mean loss and samples per second over all ranks, and start anew. Every rank must call this."""
        loss_sum, count = take.total(self._loss_sum, self._count)
        rate = self._samples / max(1e-9, time.perf_counter() - self._begun)
        self.restart()
        return loss_sum / count, rate

    @property
    def run_seconds(self) -> float:
        """Seconds since this meter was made."""
        return time.perf_counter() - self._first
