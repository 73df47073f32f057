"""What chaos does to the ranks of one launch, and when: a seeded plan of signals."""

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
_EARLY = 0.15  # share of strikes that do not wait for the training to begin
_FREEZES = 0.25  # share of launches in which a rank is frozen for a moment before the strike
_FREEZE_S = 1.0
_SKEW_S = 2.0  # a stop reaches ranks up to so far apart

Ranks = Sequence[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Blow:
    """One signal to one rank, at a moment."""

    at_s: float
    rank: int
    number: signal.Signals


@dataclass
class Striker:
    """Waits for its moment in one launch, then strikes. It is called at every look of the launcher."""

    dice: random.Random
    begun: Callable[[], bool]
    """Whether the training of this launch has begun."""
    spread_s: float
    """How long after its begin a strike comes, at most."""
    armed: bool = True
    """Whether to strike at all."""
    kind: str = ""
    """What was done, if anything was."""
    froze: bool = False
    _blows: list[Blow] = field(default_factory=list)
    _early_s: float = -1.0
    _first_s: float = 0.0

    def __post_init__(self) -> None:
        """Throw the dice for this launch."""
        if self.dice.random() < _EARLY:
            self._early_s = self.dice.uniform(0.0, self.spread_s * 4)

    def __call__(self, ranks: Ranks) -> None:
        """Strike, if it is time."""
        now = time.monotonic()
        self._first_s = self._first_s or now
        if self.armed and self._is_time(now):
            self.armed = False
            self._plan(now + self.dice.uniform(0.0, self.spread_s), len(ranks))
        for blow in [blow for blow in self._blows if blow.at_s <= now]:
            self._blows.remove(blow)
            process = ranks[blow.rank]
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(blow.number)

    def _is_time(self, now: float) -> bool:
        early = 0 <= self._early_s <= now - self._first_s
        return early or self.begun()

    def _plan(self, at_s: float, ranks: int) -> None:
        self.kind = self.dice.choices(KINDS, _WEIGHTS)[0]
        number = signal.SIGKILL if self.kind.startswith("kill") else signal.SIGTERM
        struck = range(ranks) if self.kind.endswith("all") else [self.dice.randrange(ranks)]
        if self.dice.random() < _FREEZES:
            self.froze = True
            frozen, thaw = self.dice.randrange(ranks), at_s + self.dice.uniform(0.1, _FREEZE_S)
            self._blows += [Blow(at_s, frozen, signal.SIGSTOP), Blow(thaw, frozen, signal.SIGCONT)]
            at_s = thaw
        skew = _SKEW_S * self.dice.random() if number == signal.SIGTERM else 0.0
        self._blows += [Blow(at_s + self.dice.uniform(0.0, skew), rank, number) for rank in struck]
