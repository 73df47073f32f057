"""Which tests count on being quick? `python scripts/unfair_tests.py [--loops N] [--share S] [PYTEST WORDS]`.

Runs tests beside busy loops, on a machine that is unfair to them: every now and then, random processes of theirs get only
the time that nobody else wants (SCHED_IDLE), for up to a second. What is paused so at a bad moment shows races. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

PAUSES_S = (0.05, 0.2, 0.5, 1.0)
PYTEST = ("-m", "pytest", "--numprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")


def main() -> int:
    """Run pytest to its end, unfairly; exit as it does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", type=int, default=1, help="busy loops beside the tests")
    parser.add_argument(
        "--share", type=float, default=0.15, help="of their processes that are held back at a time"
    )
    parser.add_argument("--seed", type=int, default=0)
    asked, words = parser.parse_known_args()
    dice = random.Random(asked.seed)
    with contextlib.ExitStack() as stack:
        for _ in range(asked.loops):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        tests = stack.enter_context(subprocess.Popen([sys.executable, *PYTEST, *words]))
        while tests.poll() is None:
            for process in below(tests.pid):
                hold_back(process, os.SCHED_IDLE if dice.random() < asked.share else os.SCHED_OTHER)
            time.sleep(dice.choice(PAUSES_S))
    return tests.returncode


def below(root: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    children = defaultdict(list)
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(place.name))
    found, waiting = [], [root]
    while waiting:
        found += (born := children[waiting.pop()])
        waiting += born
    return found


def hold_back(process: int, policy: int) -> None:
    """Give all threads of a process this scheduling policy."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main())
