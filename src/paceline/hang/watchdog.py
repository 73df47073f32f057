"""Detection of a hang: a thread of every rank checks progress twice a second, writes a report and announces the verdict."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline import handover
from paceline.hang.collectives import waits_for_others
from paceline.hang.crash import dump_stacks_on_crash
from paceline.hang.judge import judge, moves, still_moving
from paceline.hang.rank_report import (
    RankException,
    RankReport,
    State,
    current_report,
    read_report,
    read_reports,
    write_report,
)
from paceline.hang.verdict import HangVerdict, read_verdict, write_verdict
from paceline.rundir import RunDir, make_private
from paceline.safe_open import open_to_write
from paceline.telemetry.pulse import REST_S, Pulse
from paceline.world.world import World

_CHECK_S = 0.5
_RANKS_PER_S = 128  # checks per second of a large world: a shared file system has other work
_ANSWER_S = 1.5  # time for other ranks to write their reports
_BUSY_S = 5.0  # the same for a running process of this host: a busy machine may delay it
_RAISE_AGAIN_S = 2.0
_HELD_S = 2.0  # a check that comes this late means that this process itself was stopped or starved

Explain = Callable[[BaseException], RankException | None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Deadline:
    """When a rank is ended that waits in native code, where no exception can reach it, as under NCCL."""

    after_s: float
    end: Callable[[Exception], object]


class _Alarm:
    """A file whose modification time asks all ranks for a report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heard_s, self._raised_s = 0.0, 0.0

    def acknowledge(self) -> None:
        """Treat the last alarm as answered."""
        self._heard_s = self._last_s()

    def is_new(self) -> bool:
        """Acknowledge the last alarm; return whether that was not done before."""
        last_s = self._last_s()
        if last_s <= self._heard_s:
            return False
        self._heard_s = last_s
        return True

    def sound(self) -> None:
        """Ask all ranks for a report."""
        self._raised_s = time.monotonic()
        with contextlib.suppress(OSError):
            make_private(self._path.parent)
            os.close(open_to_write(self._path, os.O_WRONLY))
            os.utime(self._path)
            self.acknowledge()

    def sound_again(self) -> None:
        """Repeat the alarm if the last one is some time ago."""
        if time.monotonic() - self._raised_s > _RAISE_AGAIN_S:
            self.sound()

    def _last_s(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:
            return 0.0


@dataclass
class Hang:
    """A hang of this rank that lasts."""

    signs: int
    """Signs of progress before it."""
    since_s: float
    reported: bool = False


class Watchdog:
    """Watches this rank from a thread.

    It writes files and messages. It never touches the training, except that it ends one that NCCL would keep for ever.
    """

    def __init__(
        self,
        directory: RunDir,
        world: World,
        pulse: Pulse,
        say: Say,
        explain: Explain,
        deadline: Deadline | None = None,
    ) -> None:
        self._directory, self._world, self._pulse = directory, world, pulse
        self._say, self._explain, self._deadline = say, explain, deadline
        self._interval_s = max(_CHECK_S, world.size / _RANKS_PER_S)
        self._over = threading.Event()
        # Our own launchers enable the faulthandler before the script runs; under others, the user did.
        ours = world.launcher in {"paceline", "slurm"} or handover.INCARNATION in os.environ
        self._crashes = dump_stacks_on_crash(directory.crash(world.rank), enabled_by_us=ours)
        self._alarm = _Alarm(directory.alarm)
        self._hang: Hang | None = None
        self._last_report: RankReport | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._crashes.__enter__()
        self._report("running")
        if self._world.is_main:
            self._remove_verdict()
        self._alarm.acknowledge()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._crashes.__exit__(None, None, None)
        self._over.set()
        self._thread.join(_ANSWER_S)
        wrong = self._explain(error) if error is not None else None
        hangs = self._hang is not None and self._hang.signs == self._pulse.signs
        if wrong and wrong.lost_peer and hangs and self._last_report:
            # The place where it waited explains more than the place where it gave up.
            self._write(replace(self._last_report, state="failed", time_s=time.time(), wrong=wrong))
        else:
            self._report("failed" if wrong else "left", wrong)

    def report_unusual(self) -> None:
        """Write down what the script does now: a crash in the next collective would leave no time for it."""
        self._write(current_report(self._world, self._pulse, "running"))

    def _watch(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._over.wait(self._interval_s):
            if time.monotonic() - due > _HELD_S:
                self._pulse.sign()
            self._check()
            # Only now: a check may take long itself, which is not a sign of progress.
            due = time.monotonic() + self._interval_s

    def _check(self) -> None:
        if self._pulse.held or (self._last_report and self._last_report.state == "held"):
            self._check_debugger()
        elif self._hang is not None:
            self._check_hang(self._hang)
        elif self._pulse.quiet_s > self._pulse.limit_s:
            self._begin_hang()
        elif self._alarm.is_new():
            if self._pulse.quiet_s > max(REST_S, self._pulse.limit_s) / 2:
                self._begin_hang()
            else:
                self._report("moving")

    def _check_debugger(self) -> None:
        """Report that the run is held on purpose, and when it no longer is."""
        state: State = "held" if self._pulse.held else "running"
        if self._alarm.is_new() or self._last_report is None or self._last_report.state != state:
            self._report(state)

    def _begin_hang(self) -> None:
        self._hang = Hang(self._pulse.signs, time.monotonic())
        self._report("stuck")
        self._alarm.sound()

    def _check_hang(self, hang: Hang) -> None:
        if self._pulse.signs != hang.signs:
            self._end_hang(hang)
            return
        if self._alarm.is_new():
            self._report("stuck")  # it may wait in another place by now
        verdict = read_verdict(self._directory)
        if not hang.reported and verdict is None and self._is_lowest():
            self._judge(hang)
            self._alarm.sound_again()
        if self._deadline is not None:
            is_judged = hang.reported or verdict is not None
            awaited = verdict.ranks if verdict and verdict.waiting else ()
            self._end_if_due(self._deadline, 0.0 if is_judged else _BUSY_S, awaited)

    def _end_if_due(self, deadline: Deadline, more_s: float, awaited: tuple[int, ...]) -> None:
        """End this rank after its deadline if it waits in a collective, or others do so for it.

        A rank that only computes, compiles or reads may take longer. The verdict may come `more_s` after the deadline.
        """
        quiet_s = self._pulse.quiet_s
        due_s = max(deadline.after_s, self._pulse.limit_s)
        if quiet_s < due_s + more_s:
            return
        report = current_report(self._world, self._pulse, "stuck")
        is_awaited = self._world.rank in awaited
        if not is_awaited and not waits_for_others(report):
            return
        which = "this" if is_awaited else "another"
        error = TimeoutError(
            f"Timed out waiting for {which} rank: no step for {quiet_s:.0f} s (timeout.step_s={deadline.after_s:g})"
        )
        self._write(replace(report, state="failed", wrong=self._explain(error)))
        deadline.end(error)

    def _end_hang(self, hang: Hang) -> None:
        self._hang = None
        self._alarm.acknowledge()
        self._report("running")
        if hang.reported:
            self._remove_verdict()
            self._say("watchdog: the run makes progress again")

    def _is_lowest(self) -> bool:
        """Return whether no lower rank can report the verdict."""
        for rank in range(self._world.rank):
            report = read_report(self._directory.hang_record(rank))
            if report and (report.state == "stuck" or moves(report, time.time())):
                return False
        return True

    def _judge(self, hang: Hang) -> None:
        """Announce a verdict once all ranks have reported, or had the time to."""
        reports = read_reports(self._directory)
        running = [report for report in reports if report.state == "running"]
        awaited = {report.node for report in running if report.process.can_respond}
        answer_s = _BUSY_S if socket.gethostname() in awaited else _ANSWER_S
        incomplete = awaited or len(reports) < self._world.size
        waited_s = time.monotonic() - hang.since_s
        if incomplete and waited_s < answer_s + self._interval_s:
            return
        if not still_moving(reports, time.time()):
            self._announce(hang, judge(reports))

    def _announce(self, hang: Hang, verdict: HangVerdict) -> None:
        hang.reported = True
        with contextlib.suppress(OSError):
            write_verdict(self._directory, verdict)
        self._say(f"watchdog: no step for {self._pulse.quiet_s:.0f} s: {verdict.sentence}")
        self._say(
            f"watchdog: run `paceline hang {self._directory.root}` for the stack of every rank"
        )

    def _remove_verdict(self) -> None:
        with contextlib.suppress(OSError):
            self._directory.hang_verdict.unlink(missing_ok=True)

    def _report(self, state: State, wrong: RankException | None = None) -> None:
        self._last_report = current_report(self._world, self._pulse, state, wrong)
        self._write(self._last_report)

    def _write(self, report: RankReport) -> None:
        with contextlib.suppress(OSError):  # a full disk must not fail the training
            write_report(self._directory, report)
