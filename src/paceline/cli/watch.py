"""`paceline watch`: a live view of a run or a job, from its files and Slurm's queue."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from paceline.cli.named_run import NewestRunArguments, named_or_newest
from paceline.config.arguments import option
from paceline.errors import ConfigError
from paceline.report.dashboard import follow, print_state
from paceline.report.state import RunWatcher

_SHORTEST_S = 0.2
_LONGEST_S = 3600


@dataclass(frozen=True, kw_only=True)
class WatchArguments(NewestRunArguments):
    """It needs neither a server nor an open port. Ctrl-C ends the view, not the run."""

    once: bool = False
    """Print the state once; this is the default without a terminal."""
    json: bool = False
    """Print the state once, as JSON."""
    every: float = option(2.0, metavar="SECONDS")
    """Seconds between two updates; Slurm's queue is read every 10 s at most."""


def main(arguments: WatchArguments) -> int:
    """Show the run once, or until it ends."""
    if not _SHORTEST_S <= arguments.every <= _LONGEST_S:
        raise ConfigError(
            f"--every must be {_SHORTEST_S} to {_LONGEST_S} seconds, got {arguments.every:g}",
            fix="for example: --every 2",
        )
    watcher = RunWatcher(named_or_newest(arguments))
    if arguments.json:
        print(json.dumps(watcher.look().facts(), indent=2))
    elif arguments.once or not _is_terminal():
        print_state(watcher.look())
    else:
        follow(watcher, arguments.every)
    return 0


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
