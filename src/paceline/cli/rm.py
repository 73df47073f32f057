"""`paceline rm`: delete the folders of runs, after asking."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cli.runs import runs_folder
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError
from paceline.report.delete_run import delete, folders_to_delete, refuse_live
from paceline.report.runs import RunSummary, summarize
from paceline.report.runs_table import checkpoints_of, print_runs
from paceline.terminal import plain, say
from paceline.units import human_size


@dataclass(frozen=True, kw_only=True)
class RmArguments:
    """Shows state, size and checkpoints of the runs, and asks. A run that waits or trains is refused; checkpoints that checkpoint.to put elsewhere stay."""

    names: tuple[str, ...] = positional(metavar="RUN")
    """Names of runs in the folder of all runs."""
    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""
    yes: bool = False
    """Delete without asking; needed without a terminal."""


def main(arguments: RmArguments) -> int:
    """Delete the runs; return 1 if the answer is no."""
    folder = runs_folder(arguments.runs)
    found = summarize(folders_to_delete(arguments.names, folder))
    for run in found:
        refuse_live(run)
    if not arguments.yes and not _agreed(found, arguments):
        print("nothing was deleted")
        return 1
    for run in found:
        delete(run)
        facts = f"{run.status}, {human_size(run.size_bytes)}, checkpoints: {checkpoints_of(run)}"
        say(f"deleted {run.folder.root} ({facts})")
        if run.checkpoints_at:
            say(f"its checkpoints stay in {plain(run.checkpoints_at)}")
    return 0


def _agreed(found: Sequence[RunSummary], arguments: RmArguments) -> bool:
    """Show the runs and ask; without a terminal, raise ConfigError with the line to type."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        runs = [] if arguments.runs == "runs" else ["--runs", arguments.runs]
        line = shlex.join(["paceline", "rm", *arguments.names, *runs, "--yes"])
        raise ConfigError(
            "there is no terminal to ask whether to delete; nothing was deleted",
            fix=f"type `{plain(line)}`",
        )
    print_runs(found)
    size = human_size(sum(run.size_bytes for run in found))
    what = "this run" if len(found) == 1 else f"these {len(found)} runs"
    try:
        answer = input(f"delete {what} ({size})? [y/N] ")
    except EOFError:
        print()
        return False
    return answer.strip().lower() in {"y", "yes"}
