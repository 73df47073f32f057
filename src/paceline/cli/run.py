"""Start N supervised ranks of a script on this machine; a failure ends all, is shown, and the run goes on from its newest checkpoint."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time

from paceline.config.intervals import seconds_from
from paceline.errors import ConfigError
from paceline.launch.restart import DEFAULT_RESTARTS, Restarts, launch_with_restarts
from paceline.launch.spec import LaunchSpec, Target, script

HELP = "start N ranks of a script on this machine, supervised, and again after a failure"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument("script", help="the script; words after it are its own, and so is everything after --")
    add_launch_arguments(parser)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of every verb that starts a training."""
    parser.add_argument(
        "-n",
        "--ranks",
        default="1",
        help="number of ranks on this machine; 2:4 starts 4 and may go on with as few as 2",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        help=f"start again after so many failures without progress in between (default: {DEFAULT_RESTARTS} once a checkpoint is saved)",
    )
    parser.add_argument(
        "--stop-after", default="", metavar="TIME", help="save and leave in time with exit code 75: 30m, 2h, HH:MM:SS"
    )


def main(known: argparse.Namespace) -> int:
    """Start the script."""
    return start(script(known.script), known)


def start(target: Target, known: argparse.Namespace) -> int:
    """Launch and, if a rank failed, say which and why; return the exit code."""
    fewest, ranks = ranks_from(known.ranks)
    if known.max_restarts is not None and known.max_restarts < 0:
        raise ConfigError(f"--max-restarts {known.max_restarts} is negative", fix="give 0 for no restart")
    deadline_s = time.time() + seconds_from(known.stop_after) if known.stop_after else math.inf
    spec = LaunchSpec(target, ranks, tuple(known.arguments), deadline_s=deadline_s)
    failure = launch_with_restarts(spec, Restarts(known.max_restarts, fewest), sys.stdout, _say)
    if failure is None:
        return 0
    _say(failure.message)
    return failure.exit_code


def ranks_from(text: str) -> tuple[int, int]:
    """Return the fewest ranks to go on with (0: no fewer), and those to start.

    >>> ranks_from("4"), ranks_from("2:4")
    ((0, 4), (2, 4))
    """
    found = re.fullmatch(r"(?:(\d+):)?(-?\d+)", text)
    if not found or (found[1] and not 1 <= int(found[1]) <= int(found[2])):
        raise ConfigError(f"-n {text!r} is not a number of ranks", fix="give one, as in -n 4, or a range, as in -n 2:4")
    return int(found[1] or 0), int(found[2])


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"\n{text}", file=sys.stderr, flush=True)
