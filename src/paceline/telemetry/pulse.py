"""What this rank does right now, since when, and how long that may take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import TypeVar

T = TypeVar("T")

REST_S = 3.0
"""What any act may take, however short the steps are."""

_FIRST_S = 300.0  # before the first step is done nothing is usual yet: it compiles, and file systems are cold
_REMEMBERED = 64
_FREQUENT = (
    0.9  # as long as the longest tenth of the steps is usual, too: one in ten may evaluate or save
)


class Pulse:
    """Set by the training, read by the watchdog's thread: every step and every part of an evaluation is a sign of life."""

    def __init__(self, multiple: float, rest_s: float = REST_S) -> None:
        self._multiple, self._rest_s = multiple, rest_s
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._extra_s, self._step_begun = _FIRST_S, 0.0
        self.step, self.doing, self.signs = 0, "starting", 0
        self.since = time.monotonic()

    def sign(self) -> None:
        """Show that this rank moves."""
        self.since = time.monotonic()
        self.signs += 1

    def begin(self, what: str, extra_s: float = 0.0) -> None:
        """Begin another act, which may take so much longer than a few steps."""
        self.doing = what
        self._extra_s = extra_s if self._step_begun else max(extra_s, _FIRST_S)
        self.sign()

    def reading(self, steps: Iterable[T]) -> Iterator[T]:
        """Pass on steps: what is waited for is reading, what is done with them is a step."""
        self.begin("reading")
        for step in steps:
            self.begin("step")
            yield step
            self.begin("reading")

    def step_done(self, step: int) -> None:
        """Take note of a step, and of its time; the first one has none."""
        now = time.monotonic()
        if self._step_begun:
            self._times.append(now - self._step_begun)
        self._step_begun, self.step = now, step
        self.sign()

    @property
    def usual_s(self) -> float:
        """The median step; 0 while there is none."""
        return median(self._times) if self._times else 0.0

    @property
    def limit_s(self) -> float:
        """How long this rank may show no sign of life."""
        return self._rest_s + self._extra_s + self._multiple * usual(list(self._times))

    @property
    def quiet_s(self) -> float:
        """How long it has shown none."""
        return time.monotonic() - self.since


def usual(times: list[float]) -> float:
    """Return what a step takes that is no exception.

    >>> usual([]), usual([1.0, 1.0, 1.0, 9.0]), usual([1.0] * 19 + [9.0])
    (0.0, 9.0, 1.0)
    """
    return sorted(times)[min(len(times) - 1, int(len(times) * _FREQUENT))] if times else 0.0
