"""How N ranks start on this machine, and how they all end when one does."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline import handover
from paceline.launch.failure import Ended, Failure, find_culprit
from paceline.launch.logs import RankOutput
from paceline.launch.spec import LaunchSpec

MEETING_FILE = "meeting"
_LOOK_S = 0.1
_GATHER_S = 1.0  # how long to wait for other ranks' own words after the first has failed
_GRACE_S = 3.0  # how long a rank may take to leave before it is killed


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: RankOutput
    failure_file: Path
    joined_mark: Path
    ended_s: float = 0.0

    @property
    def ended(self) -> Ended:
        return Ended.read(self.number, self.process.poll(), self.ended_s, self.failure_file, tuple(self.output.tail))


def launch(spec: LaunchSpec, screen: TextIO | None = None) -> Failure | None:
    """Run N supervised ranks to their end; return the first failure, if any. Nothing is left running."""
    with _private_folder() as folder, _terminated_as_interrupt():
        ranks: list[_Rank] = []
        try:
            for number in range(spec.ranks):
                ranks.append(_start(spec, number, folder, screen))  # noqa: PERF401 - one that started is ended, whatever comes
            _watch(ranks)
            return find_culprit([rank.ended for rank in ranks]) if _any_failed(ranks) else None
        finally:
            _end_all(ranks)
            for rank in ranks:
                rank.output.close()


def _start(spec: LaunchSpec, number: int, folder: Path, screen: TextIO | None) -> _Rank:
    failure_file = folder / f"failure-{number:04d}.json"
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline.launch.child", *spec.target.words, *spec.arguments],
        env=_environment(spec, number, folder, failure_file, screen),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that Ctrl-C reaches the launcher alone, which ends the ranks in order
    )
    joined_mark = handover.joined_mark(folder / MEETING_FILE, number)
    return _Rank(number, process, RankOutput(number, spec.ranks, screen), failure_file, joined_mark)


def _environment(
    spec: LaunchSpec, number: int, folder: Path, failure_file: Path, screen: TextIO | None
) -> dict[str, str]:
    env = dict(os.environ)
    env |= {
        "RANK": str(number),
        "WORLD_SIZE": str(spec.ranks),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(spec.ranks),
    }
    env |= {handover.MEETING: str(folder / MEETING_FILE), handover.FAILURE: str(failure_file)}
    env[handover.LAUNCHER] = str(os.getpid())
    # Each rank sets torch's threads itself; without this, NumPy would take all cores in each.
    env.setdefault("OMP_NUM_THREADS", "1")
    if spec.settings:
        env[handover.SETTINGS] = json.dumps(json.loads(env.get(handover.SETTINGS) or "{}") | dict(spec.settings))
    if screen is not None and screen.isatty():
        env[handover.TERMINAL] = "1"
    return env


def _watch(ranks: list[_Rank]) -> None:
    """Pass on output until all ranks have ended, or shortly after one has failed."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            os.set_blocking(rank.process.stdout.fileno(), False)
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        deadline = float("inf")
        while time.monotonic() < deadline:
            _pass_on(selector)
            if _note_ends(ranks):
                deadline = min(deadline, time.monotonic() + _GATHER_S)
            if all(rank.ended_s for rank in ranks):
                break
        _pass_on(selector, wait_s=0)


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
    left = [rank for rank in ranks if rank.process.returncode == 0 and not rank.joined_mark.exists()]
    return bool(left) and any(rank.process.returncode is None and rank.joined_mark.exists() for rank in ranks)


def _end_all(ranks: list[_Rank]) -> None:
    """End every rank that still runs, and whatever it started: first asked, then killed."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    _signal(running, signal.SIGTERM)
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


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C while ranks run, so that they are ended with us."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
