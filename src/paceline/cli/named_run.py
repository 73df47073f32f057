"""Which run a verb is about: the one that was named, or the newest."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.runs import no_runs, runs_folder
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError
from paceline.report.find_run import NamedRun, find_run
from paceline.report.runs import run_folders
from paceline.terminal import plain, say

_NEWEST = 3


@dataclass(frozen=True, kw_only=True)
class NamedRunArguments:
    """Arguments of every verb that must be told its run."""

    run: str = positional("", metavar="RUN|JOBID", needed=True)
    """Name or folder of a run, or the id of a Slurm job."""
    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""


@dataclass(frozen=True, kw_only=True)
class NewestRunArguments:
    """Arguments of every verb that takes the newest run by default."""

    run: str = positional("", metavar="RUN|JOBID")
    """Name or folder of a run, or the id of a Slurm job (default: the run that was started last)."""
    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""


def named_run(arguments: NamedRunArguments) -> NamedRun:
    """Return the run that was named; raise ConfigError with the newest runs if none was."""
    runs = Path(arguments.runs)
    if arguments.run:
        return find_run(arguments.run, runs)
    newest = ", ".join(plain(folder.name) for folder in run_folders(runs)[:_NEWEST])
    raise ConfigError(
        f"which run? newest: {newest}" if newest else f"which run? there are none in {runs}",
        fix="name a run, its folder or a job; `paceline jobs` lists submitted runs",
    )


def named_or_newest(arguments: NewestRunArguments) -> NamedRun:
    """Return the run that was named, or else the newest one."""
    runs = Path(arguments.runs)
    return find_run(arguments.run or newest_run(arguments.runs), runs)


def newest_run(runs: str) -> str:
    """Return the folder of the run that was started last, and say on standard error that it was taken."""
    folders = run_folders(runs_folder(runs))
    if not folders:
        problem, _, fix = no_runs(Path(runs)).partition("\n")
        raise ConfigError(problem, fix=f"name a run or its folder, {fix}")
    say(f"the newest run: {folders[0]}", sys.stderr)
    return f"./{folders[0]}" if not folders[0].is_absolute() else str(folders[0])
