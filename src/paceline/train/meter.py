"""How well and how fast it went since a moment."""

from __future__ import annotations

import time
from collections import deque

from paceline.train.async_loss import AsyncLoss
from paceline.train.lane_sum import Note
from paceline.train.optimizer_step import OptimizerStep

_MOST_LATE = 64


class Meter:
    """The mean loss and the speed since a moment."""

    def __init__(self) -> None:
        self._first = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        """Start anew, now."""
        self._begun = time.perf_counter()
        self._loss = self._counted = 0.0
        self._late: deque[AsyncLoss] = deque()
        self._samples = 0

    def leave_out(self, seconds: float) -> None:
        """Let some seconds that just went by not count."""
        self._begun += seconds

    def add(self, note: Note, samples: int) -> None:
        """Take one step's note; `samples` are those of all ranks."""
        if isinstance(note.loss, AsyncLoss):
            self._late.append(note.loss)
        else:
            self._loss += note.loss
        self.settle(_MOST_LATE)
        self._counted += note.counted
        self._samples += samples

    def settle(self, left: int = 0) -> None:
        """Wait for the losses that were on their way, and add them, but for the last few."""
        while len(self._late) > left:
            self._loss += float(self._late.popleft())

    def close(self, optimizer_step: OptimizerStep) -> tuple[float, float]:
        """Return mean loss and samples per second over all ranks, and start anew. Every rank must call this."""
        self.settle()
        total = optimizer_step.total(Note(self._loss, self._counted))
        rate = self._samples / max(1e-9, time.perf_counter() - self._begun)
        self.restart()
        return float(total.loss) / total.counted, rate

    def state(self, optimizer_step: OptimizerStep) -> list[float]:
        """Return the sums so far, over all ranks, for a checkpoint. Every rank must call this."""
        self.settle()
        total = optimizer_step.total(Note(self._loss, self._counted))
        return [float(total.loss), total.counted]

    def restore(self, state: list[float], *, mine: bool) -> None:
        """Go on from such sums; `mine` says whether they count as what this rank knows."""
        self.restart()
        self._loss, self._counted = state if mine else (0.0, 0.0)

    @property
    def run_seconds(self) -> float:
        """Seconds since this meter was made."""
        return time.perf_counter() - self._first
