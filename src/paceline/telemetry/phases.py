"""What does a rank spend its own time on? Phase by phase, apart from its waiting for others."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PHASES = ("data", "forward", "backward", "optimizer", "gc", "other")
"""A rank's own work. `gc` is Python's garbage collection, taken out of the phase that it interrupts."""

WAIT = "wait"
"""Not its own: it waits for others, or sends."""

_NOTHING = dict.fromkeys((*PHASES, WAIT), 0.0)
_LEAST_STEPS = 16  # of a window: two odd steps of them are left out of what is steady
_ODD = 2


class PhaseClock:
    """A stopwatch that always runs, for one phase after the other. It costs half a microsecond a change."""

    def __init__(self) -> None:
        self._spent = _NOTHING.copy()
        self._phase, self._since = "other", time.perf_counter()
        self._collecting = 0.0
        self.trail: list[tuple[str, float, float]] | None = None
        """Where each phase's begin and end are kept, if they are asked for; a collection lies within another."""
        self.told = False
        """Whether the last step itself told its phases."""
        self.first_bucket = 0.0
        """When, by `time.perf_counter`, the first gradients of the last step were ready to be sent."""

    def begin_step(self) -> None:
        """Hear that a step begins, which will tell its phases."""
        self.told, self.first_bucket = True, 0.0

    def enter(self, phase: str) -> None:
        """Let the time from now on belong to a phase."""
        now = time.perf_counter()
        self._spent[self._phase] += now - self._since
        if self.trail is not None:
            self.trail.append((self._phase, self._since, now))
        self._phase, self._since = phase, now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let what is done within be waiting for others, and go on as before after it."""
        before = self._phase
        self.enter(WAIT)
        yield
        self.enter(before)

    def bucket_ready(self) -> None:
        """Hear that gradients are ready, and that from now on it is others who are waited for."""
        self.enter(WAIT)
        self.first_bucket = self.first_bucket or self._since

    def take(self, asked: float, got: float, ready: float) -> dict[str, float]:
        """Return what was spent since the last call; of a step that told nothing, all until `ready` is forward."""
        self.enter("other")
        spent, self._spent = self._spent, _NOTHING.copy()
        if not self.told:
            spent["other"] = max(0.0, spent["other"] - (self._since - got))
            spent["forward"] += ready - got
            self.first_bucket = ready
        self.told = False
        spent["ready"] = (self.first_bucket or ready) - asked
        return spent

    @contextlib.contextmanager
    def hearing_collections(self) -> Iterator[None]:
        """Take the time of garbage collections, in whichever thread: all need the interpreter."""
        gc.callbacks.insert(0, self._collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collection)

    def _collection(self, moment: str, _: object) -> None:
        now = time.perf_counter()
        if moment == "start":
            self._collecting = now
            return
        if self.trail is not None:
            self.trail.append(("gc", self._collecting, now))
        self._spent["gc"] += now - self._collecting
        self._since += now - self._collecting


@dataclass(frozen=True)
class PhaseTime:
    """What a phase took of late."""

    mean_s: float
    """Mean seconds a step."""
    steady_s: float
    """The same without the two longest steps; 0 after too few steps."""
    largest_s: float
    """The longest of a step."""
    largest_step: int
    """Which step that was."""


class Window:
    """Sums and longest steps over some steps, at a cost that does not grow with them."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: dict[str, float] = defaultdict(float)
        self.longest: dict[str, list[tuple[float, int]]] = {}
        self._second: dict[str, float] = defaultdict(lambda: -math.inf)

    def add(self, step: int, spent: Mapping[str, float]) -> None:
        """Take the times of a step."""
        self.steps += 1
        sums, second = self.sums, self._second
        for phase, seconds in spent.items():
            sums[phase] += seconds
            if seconds > second[phase]:  # seldom, and all else is on the way of every step
                longest = sorted([*self.longest.get(phase, ()), (seconds, step)], reverse=True)[
                    :_ODD
                ]
                self.longest[phase] = longest
                if len(longest) == _ODD:
                    second[phase] = longest[-1][0]

    @property
    def full(self) -> bool:
        """Whether it holds enough to be told from chance."""
        return self.steps >= _LEAST_STEPS


def summary(windows: list[Window]) -> dict[str, PhaseTime]:
    """Return what each phase took over all windows.

    >>> window = Window()
    >>> for step, seconds in enumerate([1.0, 1.0, 7.0, 1.0], 1):
    ...     window.add(step, {"data": seconds})
    >>> summary([window])
    {'data': PhaseTime(mean_s=2.5, steady_s=1.0, largest_s=7.0, largest_step=3)}
    """
    steps = sum(window.steps for window in windows)
    found = {}
    for phase in dict.fromkeys(name for window in windows for name in window.sums):
        total = sum(window.sums.get(phase, 0.0) for window in windows)
        longest = sorted(
            (one for window in windows for one in window.longest.get(phase, ())), reverse=True
        )[:_ODD]
        rest = steps - len(longest)
        steady = max(0.0, total - sum(seconds for seconds, _ in longest)) / rest if rest else 0.0
        found[phase] = PhaseTime(total / steps, steady, *longest[0])
    return found
