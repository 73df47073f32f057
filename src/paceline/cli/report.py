"""`paceline report`: one HTML file that shows a run, or compares several."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.watch import newest_runs
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError
from paceline.report.failure import ensure_failure_page
from paceline.report.find_run import NamedRun, find_run
from paceline.terminal import plain
from paceline.units import human_size


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """The page shows curves, step times, ranks, restarts and settings. It needs no server and no network."""

    names: tuple[str, ...] = positional((), metavar="RUN", needed=True)
    """Names or folders of runs, or ids of Slurm jobs."""
    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""
    to: str = option("", metavar="FILE")
    """File to write (default: report.html in the run's folder; for several runs, beside the first)."""
    json: bool = False
    """Print the data of the page as JSON instead of writing a file."""


def main(arguments: ReportArguments) -> int:
    """Write the page, or print its data."""
    runs = _named_runs(arguments)
    from paceline.report.page.page_data import report_data  # imports NumPy

    # Before the data: the page has it as a section.
    failed = [] if arguments.json else [run for run in runs if ensure_failure_page(run)]
    facts = report_data(runs)
    if arguments.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return 0
    from paceline.report.page.document import render_page
    from paceline.rundir import make_private, write_whole, writing_to

    path, page = _path(arguments.to, runs), render_page(facts)
    with writing_to(path, "name another file with --to FILE"):
        make_private(path.absolute().parent)
        write_whole(path, page)
    print(f"{plain(str(path))} ({human_size(len(page))})")
    for run in failed:
        print(f"{plain(run.name)} failed: {plain(str(run.folder.failure))}")
    return 0


def _named_runs(arguments: ReportArguments) -> list[NamedRun]:
    folder = Path(arguments.runs)
    if not arguments.names:
        newest = ", ".join(newest_runs(folder))
        raise ConfigError(
            f"which run? newest: {newest}" if newest else f"which run? there are none in {folder}",
            fix="name a run or its folder: paceline report runs/NAME",
        )
    by_folder = {}
    for name in arguments.names:
        run = find_run(name, folder)
        by_folder[run.folder.root.resolve()] = run
    return list(by_folder.values())


def _path(to: str, runs: list[NamedRun]) -> Path:
    if to:
        return Path(to)
    first = runs[0].folder
    return first.report if len(runs) == 1 else first.root.parent / first.report.name
