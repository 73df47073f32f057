"""`paceline watch`: a live view of a run or a job, from its files and Slurm's queue."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.config.arguments import option, positional
from paceline.errors import ConfigError
from paceline.report.dashboard import follow, print_state
from paceline.report.find_run import NamedRun, find_run
from paceline.report.state import RunWatcher
from paceline.rundir import RunDir

_SHORTEST_S = 0.2
_LONGEST_S = 3600
_NEWEST = 3


@dataclass(frozen=True, kw_only=True)
class NamedRunArguments:
    """Arguments of every verb that needs one run."""

    run: str = positional("", metavar="RUN|JOBID", needed=True)
    """Name or folder of a run, or the id of a Slurm job."""
    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""


@dataclass(frozen=True, kw_only=True)
class WatchArguments(NamedRunArguments):
    """It needs neither a server nor an open port. Ctrl-C ends the view, not the run."""

    once: bool = False
    """Print the state once; this is the default without a terminal."""
    json: bool = False
    """Print the state once, as JSON."""
    every: float = option(2.0, metavar="SECONDS")
    """Seconds between two updates; Slurm's queue is read every 10 s at most."""


def named_run(arguments: NamedRunArguments) -> NamedRun:
    """Return the run that was named; raise ConfigError with the newest runs if none was."""
    runs = Path(arguments.runs)
    if arguments.run:
        return find_run(arguments.run, runs)
    newest = ", ".join(newest_runs(runs))
    raise ConfigError(
        f"which run? newest: {newest}" if newest else f"which run? there are none in {runs}",
        fix="name a run, its folder or a job; `paceline jobs` lists submitted runs",
    )


def newest_runs(runs: Path) -> list[str]:
    """Return the names of the last runs that changed, newest first."""
    inside = runs.iterdir() if runs.is_dir() else ()
    folders = [folder for folder in inside if RunDir(folder).config.is_file()]
    folders.sort(key=lambda folder: (-folder.stat().st_mtime, folder.name))
    return [folder.name for folder in folders[:_NEWEST]]


def main(arguments: WatchArguments) -> int:
    """Show the run once, or until it ends."""
    if not _SHORTEST_S <= arguments.every <= _LONGEST_S:
        raise ConfigError(
            f"--every must be {_SHORTEST_S} to {_LONGEST_S} seconds, got {arguments.every:g}",
            fix="for example: --every 2",
        )
    watcher = RunWatcher(named_run(arguments))
    if arguments.json:
        print(json.dumps(watcher.look().facts(), indent=2))
    elif arguments.once or not _is_terminal():
        print_state(watcher.look())
    else:
        follow(watcher, arguments.every)
    return 0


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
