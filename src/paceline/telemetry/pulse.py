"""Signs of progress of this rank, and the time after which their absence is a hang."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import TypeVar

T = TypeVar("T")

REST_S = 3.0
"""Time that any activity may take, however short the steps are."""

_FIRST_S = 300.0  # before the first step no time is typical: it compiles, and file systems are cold
_REMEMBERED = 64
_FREQUENT = 0.9  # the longest tenth of the steps is still typical: one in ten may evaluate or save


class Pulse:
    """Set by the training loop, read by the watchdog: every step and every batch of an evaluation is a sign of progress."""

    def __init__(self, multiple: float, rest_s: float = REST_S) -> None:
        self._multiple, self._rest_s = multiple, rest_s
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._extra_s, self._step_begun = _FIRST_S, 0.0
        self._first_begun, self._first_s = 0.0, 0.0
        self.step, self.doing, self.signs = 0, "starting", 0
        self.since = time.monotonic()
        self.unusual = ""
        """What the script did in its last unusual step; the same on every rank, unless one rank takes another way."""
        self.held = False
        """Whether the run is held on purpose, in a debugger."""

    def sign(self) -> None:
        """Note progress."""
        self.since = time.monotonic()
        self.signs += 1

    def begin(self, what: str, extra_s: float = 0.0) -> None:
        """Begin another activity, which may take `extra_s` longer than a few steps."""
        self.doing = what
        self._extra_s = extra_s if self._step_begun else max(extra_s, _FIRST_S)
        self.sign()

    def reading(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield steps: the wait for one is the activity "reading", the work on it "step"."""
        self.begin("reading")
        for step in steps:
            self._first_begun = self._first_begun or time.monotonic()
            self.begin("step")
            yield step
            self.begin("reading")

    def step_done(self, step: int) -> None:
        """Note a completed step and its time; that of the first is typical only as long as there is no other."""
        now = time.monotonic()
        if self._step_begun:
            self._times.append(now - self._step_begun)
        elif self._first_begun:
            self._first_s = min(now - self._first_begun, _FIRST_S)
        self._step_begun, self.step = now, step
        self.sign()

    @contextlib.contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        """Let the run be held on purpose: that is no hang, and not part of the step."""
        before, begun = (self.doing, self._extra_s), time.monotonic()
        self.doing, self._extra_s, self.held = doing, math.inf, True
        try:
            yield
        finally:
            self.doing, self._extra_s = before
            if self._step_begun:
                self._step_begun += time.monotonic() - begun
            self.sign()
            self.held = False

    @property
    def usual_s(self) -> float:
        """The median step time; 0 before the second step."""
        return median(self._times) if self._times else 0.0

    @property
    def limit_s(self) -> float:
        """Time without progress that counts as a hang."""
        typical_s = usual(list(self._times) or [self._first_s])
        return self._rest_s + self._extra_s + self._multiple * typical_s

    @property
    def quiet_s(self) -> float:
        """Time since the last sign of progress."""
        return time.monotonic() - self.since


def usual(times: list[float]) -> float:
    """Return the time that nine of ten steps do not exceed.

    >>> usual([]), usual([1.0, 1.0, 1.0, 9.0]), usual([1.0] * 19 + [9.0])
    (0.0, 9.0, 1.0)
    """
    if not times:
        return 0.0
    index = min(len(times) - 1, int(len(times) * _FREQUENT))
    return sorted(times)[index]
