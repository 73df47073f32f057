"""How the ranks of one node of a Slurm job start under torch's elastic agent: `python -m paceline.launch.agent_main RANKS path|module WHAT ...`.

Signals are passed on to the ranks, which are in sessions of their own and would not hear of them. Until there are any,
there is nothing to save, and the agent leaves.
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
from paceline.launch.rank_srun import leave_early
from paceline.launch.signals import STOP_SIGNALS
from paceline.world.detect import detect_world

RANK = "paceline.launch.rank_srun"
"""What a rank is started as."""


def main() -> None:
    """Start the agent; leave with the exit code of the rank that failed first, if one did."""
    for number in STOP_SIGNALS:
        signal.signal(number, _pass_on)
    try:
        world = detect_world(os.environ, os.getppid())
        from paceline.launch.elastic import (
            run_agent,
        )  # imports torch, which takes seconds: signals are heeded by now

        sys.exit(run_agent(world, int(sys.argv[1]), RANK, sys.argv[2:]))
    except PacelineError as error:
        print(f"{socket.gethostname()}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Tell the ranks of this node; where the whole job got the signal, they hear it twice, which changes nothing."""
    ranks = _ranks()
    if not ranks:
        leave_early()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


def _ranks() -> list[int]:
    found = list[int]()
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += [int(pid) for pid in children.read_text().split() if _is_rank(pid)]
    return found


def _is_rank(pid: str) -> bool:
    with contextlib.suppress(OSError):  # a process that has just ended
        return RANK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    main()
