"""How a rank finds out that the run does not move, and leaves word of where it is: a thread that looks twice a second."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from paceline import handover
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
from paceline.telemetry.pulse import REST_S, Pulse
from paceline.world.world import World

_LOOK_S = 0.5
_RANKS_PER_S = 128  # looks a second of a large world: a shared file system has other work
_ANSWER_S = 1.5  # how long others may take to say where they are
_BUSY_S = (
    5.0  # the same for one of this host whose process is seen to run: a busy machine may hold it up
)
_CALL_AGAIN_S = 2.0
_HELD_S = (
    2.0  # so late a look means that this very process was held, or starved: that is no one's hang
)

Explain = Callable[[BaseException], RankException | None]
Say = Callable[[str], None]


class Watchdog:
    """Watches this rank from a thread. It only ever writes files: whatever it finds, the training is left alone."""

    def __init__(
        self, directory: RunDir, world: World, pulse: Pulse, say: Say, explain: Explain
    ) -> None:
        self._directory, self._world, self._pulse = directory, world, pulse
        self._say, self._explain = say, explain
        self._every_s = max(_LOOK_S, world.size / _RANKS_PER_S)
        self._over = threading.Event()
        # Only ranks that our own launchers began have said so early that crashes are to be shown on the screen.
        ours = world.launcher in {"paceline", "slurm"} or handover.INCARNATION in os.environ
        self._crashes = dump_stacks_on_crash(directory.crash(world.rank), enabled_by_us=ours)
        self._stuck_at: int | None = None
        self._last: RankReport | None = None
        self._since, self._called, self._heard, self._said = 0.0, 0.0, 0.0, False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._crashes.__enter__()
        self._write("running")
        if self._world.is_main:
            self._forget()
        self._heard = self._alarm()
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
        if wrong and wrong.lost_peer and self._stuck_at == self._pulse.signs and self._last:
            # Where it waited tells more than where it gave up.
            self._put(replace(self._last, state="failed", time_s=time.time(), wrong=wrong))
        else:
            self._write("failed" if wrong else "left", wrong)

    def _watch(self) -> None:
        due = time.monotonic() + self._every_s
        while not self._over.wait(self._every_s):
            if time.monotonic() - due > _HELD_S:
                self._pulse.sign()
            self._look()
            due = (
                time.monotonic() + self._every_s
            )  # only now: a look may take long itself, and that shows no life

    def _look(self) -> None:
        if self._stuck_at is not None:
            self._still_stuck()
        elif self._pulse.quiet_s > self._pulse.limit_s:
            self._begin()
        elif (alarm := self._alarm()) > self._heard:
            self._heard = alarm
            if self._pulse.quiet_s > REST_S / 2:
                self._begin()
            else:
                self._write("moving")

    def _begin(self) -> None:
        self._stuck_at, self._since, self._said = self._pulse.signs, time.monotonic(), False
        self._write("stuck")
        self._call()

    def _still_stuck(self) -> None:
        if self._pulse.signs != self._stuck_at:
            self._stuck_at = None
            self._heard = self._alarm()
            self._write("running")
            if self._said:
                self._forget()
                self._say("watchdog: the run moves again")
            return
        if (alarm := self._alarm()) > self._heard:
            self._heard = alarm
            self._write("stuck")  # what it waits for may be another thing by now
        if not self._said and read_verdict(self._directory) is None and self._is_lowest():
            self._speak()
            if time.monotonic() - self._called > _CALL_AGAIN_S:
                self._call()

    def _is_lowest(self) -> bool:
        """Return whether no rank below can speak."""
        lower = (read_report(self._directory.hang_record(rank)) for rank in range(self._world.rank))
        return not any(
            other and (other.state == "stuck" or moves(other, time.time())) for other in lower
        )

    def _speak(self) -> None:
        """Say what holds the run up, once all have said where they are, or had time to."""
        records = read_reports(self._directory)
        awaited = [
            record.node
            for record in records
            if record.state == "running" and record.process.can_speak
        ]
        answer_s = (_BUSY_S if socket.gethostname() in awaited else _ANSWER_S) + self._every_s
        silent = awaited or len(records) < self._world.size
        if still_moving(records, time.time()) or (
            silent and time.monotonic() - self._since < answer_s
        ):
            return
        self._tell(judge(records))

    def _tell(self, verdict: HangVerdict) -> None:
        self._said = True
        with contextlib.suppress(OSError):
            write_verdict(self._directory, verdict)
        self._say(f"watchdog: no step for {self._pulse.quiet_s:.0f} s: {verdict.sentence}")
        self._say(f"watchdog: `paceline hang {self._directory.root}` shows where every rank is")

    def _forget(self) -> None:
        """Take back what was found earlier."""
        with contextlib.suppress(OSError):
            self._directory.hang_verdict.unlink(missing_ok=True)

    def _call(self) -> None:
        """Have all ranks say where they are."""
        self._called = time.monotonic()
        with contextlib.suppress(OSError):
            make_private(self._directory.alarm.parent)
            os.close(os.open(self._directory.alarm, os.O_WRONLY | os.O_CREAT, 0o600))
            os.utime(self._directory.alarm)
            self._heard = self._alarm()

    def _alarm(self) -> float:
        """Return when a rank last called."""
        try:
            return self._directory.alarm.stat().st_mtime
        except OSError:
            return 0.0

    def _write(self, state: State, wrong: RankException | None = None) -> None:
        """Write this rank's record."""
        self._last = current_report(self._world, self._pulse, state, wrong)
        self._put(self._last)

    def _put(self, record: RankReport) -> None:
        """Write a record; a disk that does not take it fails no training."""
        with contextlib.suppress(OSError):
            write_report(self._directory, record)
