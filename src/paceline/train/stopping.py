"""How a run learns that it must stop, and how all ranks stop at the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from paceline import handover
from paceline.errors import Stopped
from paceline.launch.signals import EARLY, STOP_SIGNALS
from paceline.train.lane_sum import Note, RankRequests
from paceline.train.optimizer_step import OptimizerStep

AGREE_S = 0.25  # about how often ranks ask each other where the step's own reduction does not tell
AGREE_APART_S = 5.0  # the same where replicas walk apart, and a message may be slow
_MARGIN = 1.5  # a step or a save may take so much longer than the slowest one seen
_MARGIN_S = 1.0
_BYTES_PER_S = 50e6  # what a save is taken to reach before one has been measured

_Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """Whether this rank was told to stop: by a signal, or by a deadline that comes near."""

    def __init__(self, deadline_s: float, state_bytes: int, agree_s: float = 0.0) -> None:
        self.reason = ""
        self._agree_s = agree_s
        self._deadline_s = deadline_s
        self._save_s = state_bytes / _BYTES_PER_S
        self._slowest_s = 0.0
        self._first = True
        self.saving = False
        """Whether a save is under way, which the last one must wait for."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests while the run trains; a second Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may; a run in another one has its deadline
            return
        before: dict[signal.Signals, _Handler] = {
            number: signal.signal(number, self._heed) for number in STOP_SIGNALS
        }
        self.reason = self.reason or EARLY.stop_signal
        try:
            yield
        except Exception:
            EARLY.failing = True
            raise
        except Stopped:
            if os.environ.get(handover.LAUNCHER) == str(os.getppid()):
                # All is saved, and what runs this rank lets it only leave: a late signal would make a failure of that.
                before = dict.fromkeys(before, signal.SIG_IGN)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason:
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name

    def learn_step(self, seconds: float) -> None:
        """Take how long a step took, with the evaluation that followed it. The first one, cold or compiling, tells nothing."""
        self._slowest_s = 0.0 if self._first else max(self._slowest_s, seconds)
        self._first = False

    def learn_save(self, seconds: float) -> None:
        """Take how long a save took until it was complete."""
        self._save_s = seconds

    @property
    def lead_s(self) -> float:
        """How long before the deadline to stop: time for the step under way, one more, and a save."""
        saves = 2.0 if self.saving else 1.0
        return _MARGIN * (2.0 * self._slowest_s + saves * self._save_s + self._agree_s) + _MARGIN_S

    @property
    def asked(self) -> bool:
        """Whether this rank wants all to stop after the step that comes next."""
        if not self.reason and time.time() > self._deadline_s - self.lead_s:
            self.reason = "the time limit is near"
        return bool(self.reason)


class Agreement:
    """What any rank asked for with a step, known to all of them after it."""

    def __init__(self, take: OptimizerStep, every_s: float = AGREE_S) -> None:
        self._take, self._every_s = take, every_s
        self._left = 1

    def on(self, note: Note, step_s: float) -> RankRequests:
        """Return whether to save and whether to stop, the same on all ranks. Every rank must call this after every step."""
        if not self._take.knows_all:
            self._left -= 1
            if self._left and not self._take.met:
                return RankRequests()
            note = self._take.total(Note(step_s, 1.0, save=note.save, stop=note.stop))
            self._left = max(
                1, min(1000, int(self._every_s * note.counted / max(float(note.loss), 1e-9)))
            )
        return RankRequests(save=note.save > 0, stop=note.stop > 0)
