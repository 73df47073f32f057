"""Which signals chaos sends to the ranks of one launch, and when: a seeded plan."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

KINDS = ("kill one", "kill all", "stop one", "stop all")
_WEIGHTS = (5, 1, 2, 2)
_EARLY = 0.15  # share of kills that do not wait for the first step
_PAUSES = 0.25  # share of launches in which a rank is paused (SIGSTOP) before the kill
_PAUSE_S = 1.0
_SKEW_S = 2.0  # SIGTERM reaches the ranks within this time

Ranks = Sequence[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class PlannedSignal:
    """One signal to one rank, at a moment."""

    at_s: float
    rank: int
    number: signal.Signals


@dataclass
class Killer:
    """Sends the planned signals of one launch. The launcher calls it in every poll."""

    rng: random.Random
    has_started: Callable[[], bool]
    """Whether the training of this launch has started."""
    spread_s: float
    """Longest time from the start of the training to the kill."""
    armed: bool = True
    """Whether a kill is still to be planned."""
    kind: str = ""
    """The kill that was planned, one of KINDS; empty: none."""
    froze: bool = False
    """Whether a rank was paused before the kill."""
    _planned: list[PlannedSignal] = field(default_factory=list)
    _early_s: float = -1.0
    _first_poll_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rng.random() < _EARLY:
            self._early_s = self.rng.uniform(0.0, self.spread_s * 4)

    def __call__(self, ranks: Ranks) -> None:
        """Plan the kill when the training has started; send the signals that are due."""
        now = time.monotonic()
        self._first_poll_s = self._first_poll_s or now
        if self.armed and self._is_time(now):
            self.armed = False
            self._plan(now + self.rng.uniform(0.0, self.spread_s), len(ranks))
        due = [planned for planned in self._planned if planned.at_s <= now]
        for planned in due:
            self._planned.remove(planned)
            process = ranks[planned.rank]
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(planned.number)

    def _is_time(self, now: float) -> bool:
        early = 0 <= self._early_s <= now - self._first_poll_s
        return early or self.has_started()

    def _plan(self, at_s: float, ranks: int) -> None:
        self.kind = self.rng.choices(KINDS, _WEIGHTS)[0]
        number = signal.SIGKILL if self.kind.startswith("kill") else signal.SIGTERM
        victims = range(ranks) if self.kind.endswith("all") else [self.rng.randrange(ranks)]
        if self.rng.random() < _PAUSES:
            self.froze = True
            paused = self.rng.randrange(ranks)
            resume_s = at_s + self.rng.uniform(0.1, _PAUSE_S)
            self._planned.append(PlannedSignal(at_s, paused, signal.SIGSTOP))
            self._planned.append(PlannedSignal(resume_s, paused, signal.SIGCONT))
            at_s = resume_s
        skew = _SKEW_S * self.rng.random() if number == signal.SIGTERM else 0.0
        for rank in victims:
            moment = at_s + self.rng.uniform(0.0, skew)
            self._planned.append(PlannedSignal(moment, rank, number))
