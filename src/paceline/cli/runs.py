"""`paceline runs`: list the runs of a folder, newest first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.config.arguments import option
from paceline.errors import ConfigError
from paceline.report.runs import run_folders, summarize
from paceline.report.runs_table import print_runs
from paceline.terminal import say


@dataclass(frozen=True, kw_only=True)
class RunsArguments:
    """One line per run: state, step, loss, time trained, size on disk, intact checkpoints. The run that was started last comes first."""

    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""
    json: bool = False
    """Print the list as JSON."""


def main(arguments: RunsArguments) -> int:
    """Print the list."""
    folder = runs_folder(arguments.runs)
    found = summarize(run_folders(folder))
    if arguments.json:
        facts = {"folder": str(folder.absolute()), "runs": [run.facts() for run in found]}
        print(json.dumps(facts, indent=2, allow_nan=False))
    elif found:
        print_runs(found)
    else:
        say(no_runs(folder))
    return 0


def runs_folder(name: str) -> Path:
    """Return the folder of all runs; raise ConfigError if it is a file."""
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", fix="name the folder of all runs: --runs FOLDER")
    return folder


def no_runs(folder: Path) -> str:
    """Return that there is no run in a folder, and how to start one."""
    missing = "" if folder.is_dir() else "; that folder does not exist"
    return (
        f"there are no runs in {folder.absolute()}{missing}\n"
        "start one with `paceline train mnist`, or name another folder with --runs FOLDER"
    )
