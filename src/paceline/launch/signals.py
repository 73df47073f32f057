"""Which signals ask a launch to stop, how they are counted, and what becomes of one that comes too early."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Counts the signals that ask to stop while it is entered, once or more; nothing else happens at their arrival."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._entered = 0

    def __enter__(self) -> Self:
        if not self._entered:
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        self._entered += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered -= 1
        if not self._entered:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)


class EarlyNotice:
    """Takes the signals that come before the training listens to them.

    Until the ranks have met there is nothing to save, and this one leaves. Once they have met, others may be training:
    the word is kept, and heeded together with them after the first step. A training that fails has left the group, and
    has yet to say why: the signal that comes then is the launcher's, which ends the rest.
    """

    def __init__(self) -> None:
        self.stop_signal = ""
        self.failing = False

    def listen(self, leave: Callable[[], None]) -> None:
        """Take signals from now on, until the training takes them."""

        def heed(number: int, frame: FrameType | None) -> None:
            if self.failing or _have_met():
                self.stop_signal = signal.Signals(number).name
            else:
                leave()

        for number in STOP_SIGNALS:
            signal.signal(number, heed)


def _have_met() -> bool:
    """Return whether this rank and others are one group; torch, if it is not there yet, is not waited for."""
    distributed = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)
    return initialized is not None and bool(initialized())


EARLY = EarlyNotice()
"""What this process was told before its training could heed it."""
