"""How N ranks start on this machine, and how they all end when one does."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from paceline import handover
from paceline.errors import STOPPED
from paceline.launch.failure import Ended, Failure, find_culprit, stopped
from paceline.launch.logs import RankOutput
from paceline.launch.signals import STOP_SIGNALS, StopSignals
from paceline.launch.spec import LaunchSpec

MEETING_FILE = "meeting"
_LOOK_S = 0.1
_GATHER_S = 1.0  # how long to wait for other ranks' own words after the first has failed
_CAUSE_S = 5.0  # the same while all that failed only lost a peer: the one that left is still on its way out
_GRACE_S = 3.0  # how long a rank may take to leave before it is killed
_SAVE_S = 600.0  # how long ranks that said so may take to save before they leave

Look = Callable[[Sequence[subprocess.Popen[bytes]]], None]


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: RankOutput
    failure_file: Path
    joined_mark: Path
    graceful_stop_mark: Path
    ended_s: float = 0.0
    told_to_stop: bool = False

    @property
    def ended(self) -> Ended:
        return Ended.read(
            self.number,
            self.process.returncode,
            self.ended_s,
            self.failure_file,
            tuple(self.output.tail),
        )

    @property
    def stopped(self) -> bool:
        """Whether it saved and left, or was ended by a signal that asks for that before it could heed it."""
        return self.process.returncode == STOPPED or -(self.process.returncode or 0) in STOP_SIGNALS


def launch(
    spec: LaunchSpec,
    screen: TextIO | None = None,
    each_look: Look | None = None,
    signals: StopSignals | None = None,
) -> Failure | None:
    """Run N supervised ranks to their end; return the first failure, if any. Nothing is left running.

    A signal to stop is passed on to the ranks, which may save before they leave; a second one ends them.
    """
    with _private_folder() as folder, signals or StopSignals() as heard:
        ranks: list[_Rank] = []
        try:
            for number in spec.numbers:
                ranks.append(_start(spec, number, folder, screen))  # noqa: PERF401 - one that started is ended, whatever comes
            _watch(ranks, heard, each_look)
            failure = _outcome(ranks, heard, folder / MEETING_FILE)
        finally:
            _end_all(ranks)
            for rank in ranks:
                rank.output.close()
        run = handover.read_run(handover.run_file(folder / MEETING_FILE))
        # Not before all have ended: a save that was under way may have been completed meanwhile.
        return failure and replace(failure, progress=_progress(folder / MEETING_FILE), run=run)


def _progress(meeting: Path) -> int:
    return handover.read_progress(handover.progress_file(meeting))


def _outcome(ranks: list[_Rank], signals: StopSignals, meeting: Path) -> Failure | None:
    """Return why the launch ended, if not because it was done."""
    if all(rank.process.returncode == 0 for rank in ranks):
        return None
    failed = (
        _told_to_stop(ranks, signals, meeting)
        if signals.count or any(rank.stopped for rank in ranks)
        else None
    )
    if failed is None and _any_failed(ranks):
        failed = find_culprit([rank.ended for rank in ranks])
    return failed


def _told_to_stop(ranks: list[_Rank], signals: StopSignals, meeting: Path) -> Failure | None:
    """Return how ranks that were told to stop have ended; None if one of them failed for another reason."""
    codes = [rank.process.returncode for rank in ranks]
    spoke = [end for end in (rank.ended for rank in ranks) if end.text and not end.lost_peer]
    killed = [
        rank
        for rank in ranks
        if rank.process.returncode and rank.process.returncode < 0 and not rank.stopped
    ]
    if spoke or killed:
        return None
    if signals.first == signal.SIGINT and STOPPED not in codes:
        raise KeyboardInterrupt
    if None in codes:
        late = " and ".join(str(rank.number) for rank in ranks if rank.process.returncode is None)
        fix = "nothing, if the newest checkpoint is good: the same command goes on from it"
        return Failure(
            -1,
            128 + signal.SIGTERM,
            f"error: told to stop, but rank {late} did not leave in time, and was ended\n  fix: {fix}",
        )
    return stopped(
        _progress(meeting) if ranks[0].number == 0 else None
    )  # only the host of rank 0 hears of it


def _start(spec: LaunchSpec, number: int, folder: Path, screen: TextIO | None) -> _Rank:
    failure_file = folder / f"failure-{number:04d}.json"
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "paceline.launch.rank_local",
            *spec.target.words,
            *spec.arguments,
        ],
        env=_environment(spec, number, folder, failure_file, screen),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that Ctrl-C reaches the launcher alone, which ends the ranks in order
    )
    meeting = folder / MEETING_FILE
    output = RankOutput(number, spec.size, screen)
    marks = handover.joined_mark(meeting, number), handover.graceful_stop_mark(meeting, number)
    return _Rank(number, process, output, failure_file, *marks)


def _environment(
    spec: LaunchSpec, number: int, folder: Path, failure_file: Path, screen: TextIO | None
) -> dict[str, str]:
    env = os.environ | spec.variables(os.environ)
    env |= {
        "RANK": str(number),
        "WORLD_SIZE": str(spec.size),
        "LOCAL_RANK": str(number - spec.numbers.start),
        "LOCAL_WORLD_SIZE": str(spec.ranks),
    }
    env.pop(handover.ADDRESS, None)  # of a launch around this one
    if spec.address:
        env[handover.ADDRESS] = f"{spec.address}/{spec.attempt}"
    meeting = folder / MEETING_FILE
    env |= {handover.MEETING: str(meeting), handover.FAILURE: str(failure_file)}
    env[handover.PROGRESS] = str(handover.progress_file(meeting))
    env[handover.LAUNCHER] = str(os.getpid())
    if screen is not None and screen.isatty():
        env[handover.TERMINAL] = "1"
    return env


def _watch(ranks: list[_Rank], signals: StopSignals, each_look: Look | None) -> None:
    """Pass on output until all ranks have ended, or shortly after one has failed, or was told to stop."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            os.set_blocking(rank.process.stdout.fileno(), False)
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        limit = math.inf
        while time.monotonic() < limit and signals.count < 2:
            _pass_on(selector)
            if each_look is not None:
                each_look([rank.process for rank in ranks])
            limit = min(limit, time.monotonic() + _patience(ranks, signals))
            if all(rank.ended_s for rank in ranks):
                break
        _note_ends(ranks)  # the last look may be long ago, if this process was held
        _pass_on(selector, wait_s=0)


def _patience(ranks: list[_Rank], signals: StopSignals) -> float:
    """Return how long ranks may still run, now that some have ended or were told to stop; tell them, if it is time."""
    failed = _note_ends(ranks)
    if failed and not any(rank.stopped for rank in ranks):
        return (
            _GATHER_S
            if any(rank.process.returncode and not rank.ended.lost_peer for rank in ranks)
            else _CAUSE_S
        )
    if not (failed or signals.count):
        return math.inf
    running = [rank for rank in ranks if not rank.ended_s]
    _tell_to_stop([rank for rank in running if not rank.told_to_stop])
    leaving = any(rank.process.returncode == STOPPED for rank in ranks)
    return (
        _SAVE_S
        if leaving or all(rank.graceful_stop_mark.exists() for rank in running)
        else _GRACE_S
    )


def _tell_to_stop(ranks: list[_Rank]) -> None:
    """Ask the ranks themselves: what they have started, such as workers that read data, is theirs to end."""
    for rank in ranks:
        rank.process.send_signal(signal.SIGTERM)
        rank.told_to_stop = True


def _pass_on(selector: selectors.BaseSelector, wait_s: float = _LOOK_S) -> None:
    if not selector.get_map():
        time.sleep(wait_s / 5)
        return
    for key, _ in selector.select(wait_s):
        data = key.fileobj.read()  # type: ignore[union-attr]
        if data:
            key.data.output.feed(data)
        elif data == b"":
            selector.unregister(key.fileobj)


def _note_ends(ranks: list[_Rank]) -> bool:
    """Note which ranks have ended since the last look; return whether any ended badly."""
    for rank in ranks:
        if not rank.ended_s and rank.process.poll() is not None:
            rank.ended_s = time.time()
    return _any_failed(ranks)


def _any_failed(ranks: list[_Rank]) -> bool:
    """Return whether a rank ended badly, or left without a word before a meeting for which others wait."""
    if any(rank.process.returncode for rank in ranks):
        return True
    left = [
        rank for rank in ranks if rank.process.returncode == 0 and not rank.joined_mark.exists()
    ]
    return bool(left) and any(
        rank.process.returncode is None and rank.joined_mark.exists() for rank in ranks
    )


def _end_all(ranks: list[_Rank]) -> None:
    """End every rank that still runs, and whatever it started: first asked, then killed."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    _signal([rank for rank in running if not rank.told_to_stop], signal.SIGTERM)
    limit = time.monotonic() + _GRACE_S
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, limit - time.monotonic()))
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        assert rank.process.stdout is not None
        rank.process.stdout.close()


def _signal(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # the group is gone with its last process
            os.killpg(rank.process.pid, number)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
