"""What does a reader's copy do when it is run? All it says, and nothing of it is left running."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.course.exercise import Exercise
from paceline.course.run_lesson import TOGETHER, LessonCommand, command_of, worst

_MARK = "PACELINE_ATTEMPT"
_GRACE_S, _LOOK_S = 10, 0.05
_SETTINGS = {
    "OMP_NUM_THREADS": "1",  # with no GPU: numbers are the same on every machine
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "",  # whole lines: ranks do not mix theirs
}


@dataclass(frozen=True)
class Outcome:
    """How the runs of a copy went."""

    said: str
    code: int
    """The exit code of the last run."""
    ended: bool
    """Whether it ended by itself."""


def attempt(exercise: Exercise, file: Path, patience_s: float) -> Outcome:
    """Run a copy as its exercise says, until a run fails; each list of runs has an empty folder of its own."""
    said = ""
    for lines in exercise.runs:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            for line in lines:
                command = command_of(line, exercise.lesson)
                words = tuple(str(file) if word == "FILE" else word for word in command.words)
                found = _run(
                    LessonCommand(words, command.variables, command.times), Path(folder), patience_s
                )
                said += found.said
                if found.code or not found.ended:
                    return Outcome(said, found.code, found.ended)
    return Outcome(said, 0, ended=True)


def _run(command: LessonCommand, folder: Path, patience_s: float) -> Outcome:
    """Run one command, on as many nodes as it is for. It writes to a file: a pipe would stay open as long as any child."""
    mark = secrets.token_hex(8)
    env = os.environ | _SETTINGS | TOGETHER | dict(command.variables) | {_MARK: mark}
    limit = time.monotonic() + patience_s
    with tempfile.TemporaryFile() as said:
        with _nothing_left(mark) as agents:
            agents += [
                subprocess.Popen(
                    command.words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=said,
                    stderr=subprocess.STDOUT, start_new_session=True,
                ) for _ in range(command.times)
            ]  # fmt: skip
            ended = _wait(agents, limit)
        said.seek(0)
        text = said.read().decode("utf-8", errors="replace")
    return Outcome(text, worst([agent.returncode for agent in agents]), ended)


def _wait(agents: Sequence[subprocess.Popen[bytes]], limit: float) -> bool:
    """Return whether all have ended in time."""
    try:
        for agent in agents:
            agent.wait(max(0.1, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


@contextlib.contextmanager
def _nothing_left(mark: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield a list for processes; at its end, and at Ctrl-C, they and all that they have started are ended.

    torchrun's ranks have sessions of their own. It ends them when it is asked to; who does not heed that has the mark.
    """
    agents: list[subprocess.Popen[bytes]] = []
    try:
        yield agents
    finally:
        for agent in agents:
            _end(agent)
        _end_marked(mark)


def _end(agent: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(agent.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(_GRACE_S)


def _end_marked(mark: str) -> None:
    """End all that has the mark, and wait until it is gone."""
    limit = time.monotonic() + _GRACE_S
    while (left := list(_marked(mark))) and time.monotonic() < limit:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes that have the mark in their environment, where the system shows it (Linux)."""
    wanted = f"{_MARK}={mark}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or just gone
            if wanted in place.read_bytes().split(b"\0"):
                yield int(place.parent.name)
