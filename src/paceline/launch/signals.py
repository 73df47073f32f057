"""The signals that ask a run to stop: counted by the launcher, remembered if they come before the training starts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def signal_name(number: int) -> str:
    """Return the name of a signal in messages and events.

    >>> signal_name(2), signal_name(15)
    ('Ctrl-C', 'SIGTERM')
    """
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopSignals:
    """Counts stop signals while it is entered, which may be nested; a signal has no other effect."""

    def __init__(self) -> None:
        self.count = 0
        self.interrupts = 0
        """How many of them were Ctrl-C. Schedulers send SIGTERM twice; only a person's second Ctrl-C cuts a save short."""
        self.first: signal.Signals | None = None
        self.is_time_over = False
        """Whether the time of `--stop-after` was over before any signal came."""
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

    def end_time(self) -> None:
        """Act as on SIGTERM, because the time of the launch is over."""
        self.is_time_over = not self.count
        self._note(signal.SIGTERM, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.interrupts += number == signal.SIGINT
        self.first = self.first or signal.Signals(number)


class EarlyNotice:
    """Handles stop signals that come before the training handles them.

    Before the rendezvous there is nothing to save, and this rank exits. After it, other ranks may be training: the
    signal is remembered, and all ranks stop together after the first step. A training that fails has left the process
    group but has not reported its error yet: a signal at that moment comes from the launcher, which stops the rest.
    """

    def __init__(self) -> None:
        self.stop_signal = ""
        self.failing = False

    def listen(self, leave: Callable[[], None]) -> None:
        """Handle stop signals until the training installs its own handlers; `leave` exits."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.failing or _has_group():
                self.stop_signal = signal_name(number)
            else:
                leave()

        for number in STOP_SIGNALS:
            signal.signal(number, handle)


def _has_group() -> bool:
    """Return whether this rank is in a process group; torch is not imported for that."""
    distributed = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)
    return initialized is not None and bool(initialized())


EARLY = EarlyNotice()
"""Stop signals that this process received before its training could handle them."""
