"""Which signals ask a launch to stop, and how they are counted."""

from __future__ import annotations

import signal
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if not self._entered:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)
