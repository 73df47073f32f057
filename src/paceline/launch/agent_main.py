"""Main program of torch's elastic agent on a node of a Slurm job: `python -m paceline.launch.agent_main RANKS path|module NAME ...`.

The agent forwards signals to its ranks, which are in sessions of their own. Before they exist there is nothing to
save, and the agent exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from paceline.errors import PacelineError
from paceline.launch.rank_srun import leave_early, require_shared_folder
from paceline.launch.signals import STOP_SIGNALS
from paceline.launch.spec import ANOTHER_PYTHON
from paceline.world.detect import detect_world

RANK = "paceline.launch.rank_srun"
"""The main program of a rank."""


def main() -> None:
    """Run the agent; exit with the code of the first rank that failed."""
    for number in STOP_SIGNALS:
        signal.signal(number, _forward)
    try:
        require_shared_folder()
        world = detect_world(os.environ, os.getppid())
        # Imports torch, which takes seconds: signals are handled by now.
        from paceline.launch.elastic import run_agent

        sys.exit(run_agent(world, int(sys.argv[1]), RANK, sys.argv[2:]))
    except PacelineError as error:
        print(f"{socket.gethostname()}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _forward(number: int, frame: FrameType | None) -> None:
    """Signal the ranks of this node.

    If the whole job got the signal they receive it twice, which is harmless.
    """
    ranks = _ranks()
    if not ranks:
        leave_early()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


def _ranks() -> list[int]:
    pids: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            pids += [int(pid) for pid in children.read_text().split() if _is_rank(pid)]
    return pids


def _is_rank(pid: str) -> bool:
    marks = [RANK]
    if sys.argv[2] == ANOTHER_PYTHON:  # the rank has become that interpreter: its script tells
        marks.append(sys.argv[4])
    with contextlib.suppress(OSError):  # the process has just ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(os.fsencode(mark) in command for mark in marks)
    return False


if __name__ == "__main__":
    main()
