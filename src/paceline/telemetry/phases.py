"""Time of a rank per phase of a step, its own work apart from the wait for other ranks."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PHASES = ("data", "forward", "backward", "optimizer", "gc", "other")
"""A rank's own work. `gc` is Python's garbage collection, subtracted from the phase that it interrupts."""

WAIT = "wait"
"""Waiting for other ranks, or sending."""

_ZERO = dict.fromkeys((*PHASES, WAIT), 0.0)
_WINDOW_STEPS = 16  # at least; the two longest steps are left out of the steady mean
_LONGEST = 2


class PhaseClock:
    """A stopwatch that always runs, for one phase at a time.

    A change of phase costs half a microsecond.
    """

    def __init__(self) -> None:
        self._spent = _ZERO.copy()
        self._phase, self._since = "other", time.perf_counter()
        self._gc_since = 0.0
        self.trail: list[tuple[str, float, float]] | None = None
        """Begin and end of each phase, if a profile asks for them; a garbage collection lies inside another phase."""
        self._has_phases = False
        self._first_bucket = 0.0

    def begin_step(self) -> None:
        """Start a step that enters its phases itself."""
        self._has_phases, self._first_bucket = True, 0.0

    def enter(self, phase: str) -> None:
        """Count the time from now on for a phase."""
        now = time.perf_counter()
        self._spent[self._phase] += now - self._since
        if self.trail is not None:
            self.trail.append((self._phase, self._since, now))
        self._phase, self._since = phase, now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for other ranks."""
        before = self._phase
        self.enter(WAIT)
        yield
        self.enter(before)

    def bucket_ready(self) -> None:
        """Mark the moment at which gradients are ready to send; the time after it is waiting."""
        self.enter(WAIT)
        self._first_bucket = self._first_bucket or self._since

    def take(self, asked: float, got: float, ready: float) -> dict[str, float]:
        """Return the times since the last call.

        Without phases of its own, a step counts as forward until `ready`.
        """
        self.enter("other")
        spent, self._spent = self._spent, _ZERO.copy()
        if not self._has_phases:
            spent["other"] = max(0.0, spent["other"] - (self._since - got))
            spent["forward"] += ready - got
            self._first_bucket = ready
        self._has_phases = False
        spent["ready"] = (self._first_bucket or ready) - asked
        return spent

    @contextlib.contextmanager
    def measuring_gc(self) -> Iterator[None]:
        """Measure garbage collections of all threads: each stops the whole interpreter."""
        gc.callbacks.insert(0, self._on_gc)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, moment: str, _: object) -> None:
        now = time.perf_counter()
        if moment == "start":
            self._gc_since = now
            return
        if self.trail is not None:
            self.trail.append(("gc", self._gc_since, now))
        self._spent["gc"] += now - self._gc_since
        self._since += now - self._gc_since


@dataclass(frozen=True)
class PhaseTime:
    """Time of a phase over recent steps."""

    mean_s: float
    """Mean seconds per step."""
    steady_s: float
    """The same without the two longest steps; 0 after too few steps."""
    largest_s: float
    """The longest step."""
    largest_step: int
    """The number of that step."""


class Window:
    """Sums and longest steps over some steps, at a cost that does not grow with them."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: dict[str, float] = defaultdict(float)
        self.longest: dict[str, list[tuple[float, int]]] = {}
        self._second: dict[str, float] = defaultdict(lambda: -math.inf)

    def add(self, step: int, spent: Mapping[str, float]) -> None:
        """Add the times of a step."""
        self.steps += 1
        sums, second = self.sums, self._second
        for phase, seconds in spent.items():
            sums[phase] += seconds
            if seconds > second[phase]:  # rare; everything else runs in every step
                self._keep_longest(phase, seconds, step)

    def _keep_longest(self, phase: str, seconds: float, step: int) -> None:
        longest = [*self.longest.get(phase, ()), (seconds, step)]
        longest = sorted(longest, reverse=True)[:_LONGEST]
        self.longest[phase] = longest
        if len(longest) == _LONGEST:
            self._second[phase] = longest[-1][0]

    @property
    def full(self) -> bool:
        """Whether it has enough steps to average out chance."""
        return self.steps >= _WINDOW_STEPS


def summary(windows: list[Window]) -> dict[str, PhaseTime]:
    """Return the time of each phase over all windows.

    >>> window = Window()
    >>> for step, seconds in enumerate([1.0, 1.0, 7.0, 1.0], 1):
    ...     window.add(step, {"data": seconds})
    >>> summary([window])
    {'data': PhaseTime(mean_s=2.5, steady_s=1.0, largest_s=7.0, largest_step=3)}
    """
    phases = dict.fromkeys(name for window in windows for name in window.sums)
    return {phase: _phase_time(phase, windows) for phase in phases}


def _phase_time(phase: str, windows: list[Window]) -> PhaseTime:
    steps, total = 0, 0.0
    longest: list[tuple[float, int]] = []
    for window in windows:
        steps += window.steps
        total += window.sums.get(phase, 0.0)
        longest += window.longest.get(phase, [])
    longest = sorted(longest, reverse=True)[:_LONGEST]
    rest = steps - len(longest)
    without_longest = max(0.0, total - sum(seconds for seconds, _ in longest))
    return PhaseTime(total / steps, without_longest / rest if rest else 0.0, *longest[0])
