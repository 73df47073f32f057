"""Runs a reader's copy of a lesson, collects its output, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from paceline.course.exercise import Exercise
from paceline.course.run_lesson import INIT_BARRIER, LessonCommand, command_of, first_failure

_MARK = "PACELINE_ATTEMPT"
_GRACE_S, _POLL_S = 10, 0.05
_SETTINGS = {
    "OMP_NUM_THREADS": "1",  # and no GPU: the same numbers on every machine
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "",  # whole lines, so that the output of ranks does not mix
}


@dataclass(frozen=True)
class Outcome:
    """The result of the runs of a copy."""

    output: str
    code: int
    """Exit code of the last run."""
    ended: bool
    """False if it was stopped at the time limit."""


def attempt(exercise: Exercise, file: Path, limit_s: float) -> Outcome:
    """Run a copy until a run fails; each list of runs starts in an empty folder."""
    output = ""
    for lines in exercise.runs:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            for line in lines:
                command = command_of(line, exercise.lesson)
                argv = tuple(str(file) if word == "FILE" else word for word in command.argv)
                result = _run(replace(command, argv=argv), Path(folder), limit_s)
                output += result.output
                if result.code or not result.ended:
                    return Outcome(output, result.code, result.ended)
    return Outcome(output, 0, ended=True)


def _run(command: LessonCommand, folder: Path, limit_s: float) -> Outcome:
    """Run one command, one copy per node. The output is a file: a pipe stays open as long as any child."""
    mark = secrets.token_hex(8)
    env = os.environ | _SETTINGS | INIT_BARRIER | dict(command.variables) | {_MARK: mark}
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as output:
        with _stopped_at_exit(mark) as agents:
            for _ in range(command.nodes):
                agents.append(_start(command.argv, folder, env, output))
            ended = _wait(agents, deadline)
        output.seek(0)
        text = output.read().decode("utf-8", errors="replace")
    return Outcome(text, first_failure(agent.returncode for agent in agents), ended)


def _start(
    argv: Sequence[str], folder: Path, env: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(agents: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Return whether all agents exited before the deadline."""
    try:
        for agent in agents:
            agent.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


@contextlib.contextmanager
def _stopped_at_exit(mark: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield a list of processes; on exit and on Ctrl-C, stop them and everything they started.

    torchrun's ranks have their own sessions. Those that survive SIGTERM are found by the mark in their environment.
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
    """Kill all processes with the mark, and wait until they are gone."""
    limit = time.monotonic() + _GRACE_S
    while (left := list(_marked(mark))) and time.monotonic() < limit:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes with the mark in their environment (Linux only)."""
    wanted = f"{_MARK}={mark}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or just gone
            if wanted in place.read_bytes().split(b"\0"):
                yield int(place.parent.name)
