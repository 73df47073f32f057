"""Mean loss and samples per second since the last report."""

from __future__ import annotations

import math
import time
from collections import deque

from paceline.train.gradients.note import Note, StepEngine
from paceline.train.step.async_loss import MAX_PENDING_LOSSES, AsyncLoss


class Meter:
    """Sums of loss and samples, and the time in which they were collected."""

    def __init__(self) -> None:
        self._first = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        """Set all sums to zero, and the start to now."""
        self._begun = time.perf_counter()
        self._loss = self._counted = 0.0
        self._pending: deque[AsyncLoss] = deque()
        self._samples = 0

    def leave_out(self, seconds: float) -> None:
        """Exclude the seconds that just passed, such as those of an evaluation."""
        self._begun += seconds

    def add(self, note: Note, samples: int) -> None:
        """Add one step; `samples` counts those of all ranks."""
        if isinstance(note.loss, AsyncLoss):
            self._pending.append(note.loss)
        else:
            self._loss += note.loss
        self.settle(MAX_PENDING_LOSSES)
        self._counted += note.counted
        self._samples += samples

    def settle(self, keep: int = 0) -> None:
        """Wait for pending losses and add them, except for the newest `keep`."""
        while len(self._pending) > keep:
            self._loss += float(self._pending.popleft())

    def close(self, optimizer_step: StepEngine) -> tuple[float, float]:
        """Return mean loss and samples per second over all ranks, and restart. Every rank must call this."""
        loss, counted = self.state(optimizer_step)
        rate = self._samples / max(1e-9, time.perf_counter() - self._begun)
        self.restart()
        return loss / counted if counted else math.nan, rate

    def state(self, optimizer_step: StepEngine) -> list[float]:
        """Return the sums over all ranks, for a checkpoint. Every rank must call this."""
        self.settle()
        total = optimizer_step.total(Note(self._loss, self._counted))
        return [float(total.loss), total.counted]

    def restore(self, state: list[float], *, keep: bool) -> None:
        """Continue from sums over all ranks; `keep` is true on the rank that holds them."""
        self.restart()
        self._loss, self._counted = state if keep else (0.0, 0.0)

    @property
    def run_seconds(self) -> float:
        """Seconds since this meter was made."""
        return time.perf_counter() - self._first
