"""Show a run or a job as it goes, from its files and Slurm's queue alone: over ssh, without a port."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from paceline.errors import ConfigError, did_you_mean
from paceline.report.dashboard import follow, print_state
from paceline.report.find_run import find_run
from paceline.report.state import RunWatcher

HELP = "live view of a run or a job: queue, step, loss, speed, time left, last checkpoint, slowest rank, log"

_SHORTEST_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    add_run_argument(parser)
    parser.add_argument(
        "--once", action="store_true", help="show it once, as is done where there is no terminal"
    )
    parser.add_argument("--json", action="store_true", help="print what is known once, as JSON")
    parser.add_argument(
        "--every",
        default="2",
        metavar="SECONDS",
        help="how often to look (default: 2; at the queue every 10 at most)",
    )


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declare how a run is named, for every verb that takes one."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN|JOBID", help="a run's name or folder, or the id of a job"
    )
    parser.add_argument(
        "--runs", default="runs", metavar="FOLDER", help="where runs are (default: runs)"
    )


def named_run(known: argparse.Namespace, options: tuple[str, ...]) -> str:
    """Return the run that was named, if that and the options are all that was said."""
    for word in known.arguments:
        if word.startswith("-"):
            raise ConfigError(f"there is no option {word}", fix=did_you_mean(word, options))
        raise ConfigError(f"unexpected word {word!r}", fix="name one run, or one job")
    if not known.run:
        raise ConfigError(
            "which run?",
            fix="name a run, its folder or a job; `paceline jobs` lists those submitted",
        )
    return str(known.run)


def main(known: argparse.Namespace) -> int:
    """Show the run, once or until it is over."""
    word, every_s = (
        named_run(known, ("--once", "--json", "--every", "--runs")),
        _seconds(known.every),
    )
    watcher = RunWatcher(find_run(word, Path(known.runs)))
    if known.json:
        print(json.dumps(watcher.look().facts(), indent=2))
    elif known.once or not _is_terminal():
        print_state(watcher.look())
    else:
        follow(watcher, every_s)
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _SHORTEST_S <= seconds <= 3600:
        raise ConfigError(
            f"--every {text} is no interval", fix=f"give seconds, {_SHORTEST_S} to 3600"
        )
    return seconds


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
