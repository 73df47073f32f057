"""Mean loss and samples per second since the last report."""

from __future__ import annotations

import math
import time
from collections import Counter, deque

from paceline.config import RunConfig
from paceline.exact.row import MAX_PENDING_STEPS, Later, StepSums
from paceline.exact.step import StepEngine

_WARM_UP_STEPS = 3  # of a size: they compile, and run before a CUDA graph is captured


class WarmUp:
    """Knows which steps compile or capture something, and how long they took."""

    def __init__(self, config: RunConfig) -> None:
        self._prepares = config.compile or config.capture != "false"
        self._taken = Counter[int]()
        self._begun = 0.0

    def begin(self) -> None:
        """Note that a step begins."""
        self._begun = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Exclude what was not part of the step, such as its evaluation."""
        self._begun += seconds

    def counts(self, samples: int) -> bool:
        """Return whether the step that ends now was one of the first with this many samples, and prepared something."""
        self._taken[samples] += 1
        return self._prepares and self._taken[samples] <= _WARM_UP_STEPS

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._begun


class Meter:
    """Sums of loss and samples, and the time in which they were collected."""

    def __init__(self) -> None:
        self._first = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        """Set all sums to zero, and the start to now."""
        self._begun = time.perf_counter()
        self._loss = self._counted = 0.0
        self._pending: deque[StepSums] = deque()
        self._samples = self._left_out = 0
        self._left_out_s = 0.0

    def leave_out(self, seconds: float, samples: int = 0) -> None:
        """Exclude the seconds that just passed, such as those of an evaluation, and the samples of steps in them."""
        self._begun += seconds
        if samples:
            self._left_out_s, self._left_out = self._left_out_s + seconds, self._left_out + samples

    def add(self, sums: StepSums, samples: int) -> None:
        """Add one step; `samples` counts those of all ranks."""
        self._pending.append(sums)
        self.wait_for_losses(MAX_PENDING_STEPS if isinstance(sums.loss, Later) else 0)
        self._samples += samples

    def wait_for_losses(self, keep: int = 0) -> None:
        """Wait for pending losses and add them, except for the newest `keep`."""
        while len(self._pending) > keep:
            sums = self._pending.popleft()
            self._loss += float(sums.loss)
            self._counted += float(sums.counted)

    def close(self, optimizer_step: StepEngine) -> tuple[float, float]:
        """Return mean loss and samples per second over all ranks, and restart. Every rank must call this."""
        loss, counted = self.state(optimizer_step)
        rate = self._rate()
        self.restart()
        return loss / counted if counted else math.nan, rate

    def _rate(self) -> float:
        """Return samples per second; those of the steps that were left out only if there were no others."""
        seconds, samples = time.perf_counter() - self._begun, self._samples - self._left_out
        if not samples:
            seconds, samples = seconds + self._left_out_s, self._samples
        return samples / max(1e-9, seconds)

    def state(self, optimizer_step: StepEngine) -> list[float]:
        """Return the sums over all ranks, for a checkpoint. Every rank must call this."""
        self.wait_for_losses()
        total = optimizer_step.total(StepSums(self._loss, self._counted))
        return [float(total.loss), float(total.counted)]

    def restore(self, state: list[float], *, keep: bool) -> None:
        """Continue from sums over all ranks; `keep` is true on the rank that holds them."""
        self.restart()
        self._loss, self._counted = state if keep else (0.0, 0.0)

    @property
    def run_seconds(self) -> float:
        """Seconds since this meter was made."""
        return time.perf_counter() - self._first
