"""When a run must stop (signals, deadlines), and how all ranks agree to stop at the same step."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

import torch

from paceline import handover
from paceline.checkpoint.cadence import slow_disk_s
from paceline.config import RunConfig
from paceline.config.intervals import seconds_from
from paceline.errors import Stopped
from paceline.events import TIME_LIMIT
from paceline.exact.row import RankRequests, StepSums
from paceline.exact.step import StepEngine
from paceline.launch.signals import EARLY, STOP_SIGNALS, signal_name
from paceline.rundir import RunDir, write_whole
from paceline.world.world import World

AGREE_S = 0.25  # seconds between agreements, where the gradient reduction carries no requests
AGREE_LOCAL_SGD_S = 5.0  # the same with local SGD, which is made for slow networks
_MAX_STEPS_APART = 1000
_MARGIN = 1.5  # a step or a save may take this much longer than the slowest one so far
_MARGIN_S = 1.0

_Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """Whether this rank must stop: after a signal, or shortly before a deadline."""

    def __init__(self, deadline_s: float, state_bytes: int, agree_s: float = 0.0) -> None:
        self.reason = ""
        self._agree_s = agree_s
        self._deadline_s = deadline_s
        self._save_s = slow_disk_s(state_bytes)
        self._slowest_s = 0.0
        self._first = True
        self._interrupts = 0
        self.saving = False
        """Whether a save is in progress, which must finish before the last save."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Treat signals as stop requests while the run trains; a second Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread only; the deadline still applies
            return
        before: dict[signal.Signals, _Handler] = {}
        for number in STOP_SIGNALS:
            before[number] = signal.signal(number, self._on_signal)
        self.reason = self.reason or EARLY.stop_signal
        try:
            yield
        except Exception:
            EARLY.failing = True
            raise
        except Stopped:
            if os.environ.get(handover.LAUNCHER) == str(os.getppid()):
                # Everything is saved and this rank only has to exit. A late signal would turn that
                # into a failure.
                before = dict.fromkeys(before, signal.SIG_IGN)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self.reason = self.reason or signal_name(number)

    def learn_step(self, seconds: float) -> None:
        """Remember the slowest step, evaluation included. The first one may compile: it is ignored."""
        self._slowest_s = 0.0 if self._first else max(self._slowest_s, seconds)
        self._first = False

    def learn_save(self, seconds: float) -> None:
        """Remember the duration of the newest complete save."""
        self._save_s = seconds

    @property
    def lead_s(self) -> float:
        """Seconds before the deadline at which to stop: enough for this step, one more, and a save."""
        saves = 2.0 if self.saving else 1.0
        return _MARGIN * (2.0 * self._slowest_s + saves * self._save_s + self._agree_s) + _MARGIN_S

    @property
    def asked(self) -> bool:
        """Whether this rank asks all ranks to stop after the next step."""
        if not self.reason and time.time() > self._deadline_s - self.lead_s:
            self.reason = TIME_LIMIT
        return bool(self.reason)


class _StepPulse(NamedTuple):
    """A rank's message about its last step; also the sum of such messages over all ranks."""

    step_s: float
    ranks: float
    save: float
    stop: float


class Agreement:
    """Combines the requests of all ranks, with the same result on every rank."""

    def __init__(self, optimizer_step: StepEngine, every_s: float = AGREE_S) -> None:
        self._optimizer_step, self._every_s = optimizer_step, every_s
        self._steps_left = 1

    def on(self, sums: StepSums, step_s: float) -> RankRequests:
        """Return whether any rank asks to save or to stop. Every rank must call this after every step."""
        if self._optimizer_step.totals_are_global:
            return RankRequests(save=sums.save > 0, stop=sums.stop > 0)
        self._steps_left -= 1
        if self._steps_left and not self._optimizer_step.synchronized:
            return RankRequests()
        pulse = self._sum_over_ranks(_StepPulse(step_s, 1.0, sums.save, sums.stop))
        steps = int(self._every_s * pulse.ranks / max(pulse.step_s, 1e-9))
        self._steps_left = max(1, min(_MAX_STEPS_APART, steps))
        return RankRequests(save=pulse.save > 0, stop=pulse.stop > 0)

    def _sum_over_ranks(self, pulse: _StepPulse) -> _StepPulse:
        values = torch.tensor(pulse, dtype=torch.float64)
        return _StepPulse(*self._optimizer_step.sum_over_ranks(values).tolist())


class Stopping:
    """This rank's part in stopping the run: its own request, and the agreement with the others."""

    def __init__(
        self, world: World, config: RunConfig, optimizer_step: StepEngine, state_bytes: int
    ) -> None:
        self._world, self._config = world, config
        agree_s = AGREE_LOCAL_SGD_S if config.local_sgd.steps else AGREE_S
        self.request = StopRequest(
            _deadline(world, config) if world.is_main else math.inf,
            state_bytes,
            0.0 if optimizer_step.totals_are_global else agree_s,
        )
        self._agreement = Agreement(optimizer_step, agree_s)
        self._step_begun = time.monotonic()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Treat signals as stop requests, and let the launcher know that this rank saves first."""
        file = self._world.launcher_file
        with self.request.listening():
            if file is not None:
                handover.graceful_stop_mark(file, self._world.rank).touch(mode=0o600)
            self._name_folder()
            yield

    def _name_folder(self) -> None:
        """Let the launcher know the run folder, in which it writes how a launch failed."""
        progress = self._world.progress_file
        if progress is not None and self._world.local_rank == 0:
            folder = os.fsencode(RunDir.of(self._config).root.absolute())
            with contextlib.suppress(OSError):  # a full disk: the first save will say so
                write_whole(handover.run_file(progress), folder, durable=False)

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds in which a debugger held the run from the time of the step."""
        self._step_begun += seconds

    def agree(self, sums: StepSums) -> RankRequests:
        """Return the requests of all ranks. Every rank must call this after every step."""
        now = time.monotonic()
        step_s = now - self._step_begun  # includes reading the samples, and evaluation
        self._step_begun = now
        self.request.learn_step(step_s)
        return self._agreement.on(sums, step_s)


def _deadline(world: World, config: RunConfig) -> float:
    if not config.stop_after:
        return world.deadline_s
    return min(world.deadline_s, time.time() + seconds_from(config.stop_after))
