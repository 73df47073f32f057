"""Ranks forked from a process that has imported torch: many short trainings start in a moment."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import paceline.train.trainer  # noqa: F401 - before the fork
from paceline.launch import rank_local
from paceline.launch.environment import master_of, rank_environment
from paceline.launch.failure import Failure, RankEnd, find_culprit
from paceline.launch.spec import LaunchSpec

_PATIENCE_S = 3.0  # for the other ranks, after one has failed


def launch(spec: LaunchSpec) -> Failure | None:
    """Run the ranks of a program until they end; return the first failure."""
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name:
        folder = Path(name)
        ranks = {_fork(spec, number, folder): number for number in spec.numbers}
        ends: list[RankEnd] = []
        until = float("inf")
        while ranks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process in ranks:
                number, code = ranks.pop(process), os.waitstatus_to_exitcode(status)
                failure_file = folder / f"{number:04d}.failure"
                ends.append(RankEnd.read(number, code, time.time(), failure_file, ()))
                until = min(until, time.monotonic() + _PATIENCE_S) if code else until
            elif time.monotonic() > until:
                for left in ranks:
                    os.kill(left, signal.SIGKILL)
            time.sleep(0.01)
        failed = [end for end in ends if end.code]
        return find_culprit(failed, foreign=False) if failed else None


def _fork(spec: LaunchSpec, number: int, folder: Path) -> int:
    """Start one rank; return its process id."""
    failure_file = folder / f"{number:04d}.failure"
    env = rank_environment(spec, number, folder / "meeting", failure_file, master_of(spec))
    process = os.fork()
    if process:
        return process
    atexit._clear()  # noqa: SLF001 - or the rank would delete the temporary folders of this process
    with contextlib.suppress(BaseException):
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["rank_local", *spec.target.argv, *spec.arguments]
        rank_local.main()
    os._exit(1)
