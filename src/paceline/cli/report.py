"""`paceline report`: one HTML file that shows a run, compares several, or lists all."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.runs import no_runs, runs_folder
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError
from paceline.report.failure import ensure_failure_page
from paceline.report.find_run import NamedRun, find_run
from paceline.report.runs import run_folders, summarize
from paceline.terminal import plain, say
from paceline.units import human_size

_POINTS = 400  # of a loss curve in the index


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """The page shows curves, step times, ranks, restarts and settings. It needs no server and no network. Without RUN, it is an index of all runs, with their loss curves and links to their reports."""

    names: tuple[str, ...] = positional((), metavar="RUN")
    """Names or folders of runs, or ids of Slurm jobs (default: an index of all runs)."""
    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""
    to: str = option("", metavar="FILE")
    """File to write (default: report.html in the run's folder; for several runs, beside the first; for all runs, index.html in the folder of all runs)."""
    open: bool = False
    """Open the page in the browser."""
    json: bool = False
    """Print the data of the page as JSON instead of writing a file."""


def main(arguments: ReportArguments) -> int:
    """Write the page, or print its data."""
    if arguments.open and arguments.json:
        raise ConfigError("--open and --json exclude each other", fix="give one of them")
    if not arguments.names:
        return report_all(arguments)
    runs = _named_runs(arguments)
    from paceline.report.page.page_data import report_data  # imports NumPy

    # Before the data: the page has it as a section.
    failed = [] if arguments.json else [run for run in runs if ensure_failure_page(run)]
    facts = report_data(runs)
    if arguments.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return 0
    from paceline.report.page.document import render_page

    path = _path(arguments.to, runs)
    _write_page(path, render_page(facts))
    for run in failed:
        print(f"{plain(run.name)} failed: {plain(str(run.folder.failure))}")
    if arguments.open:
        open_in_browser(path)
    return 0


def report_all(arguments: ReportArguments) -> int:
    """Write the index page of all runs, or print its data."""
    folder = runs_folder(arguments.runs)
    found = summarize(run_folders(folder), points=_POINTS)
    if not found and not arguments.json:
        problem, _, fix = no_runs(folder).partition("\n")
        raise ConfigError(problem, fix=fix)
    from paceline.report.page.index import index_data, render_index

    facts = index_data(found)
    if arguments.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return 0
    path = Path(arguments.to) if arguments.to else folder / "index.html"
    _write_page(path, render_index(facts, path.absolute().parent))
    if arguments.open:
        open_in_browser(path)
    return 0


def _write_page(path: Path, page: bytes) -> None:
    from paceline.rundir import make_private, write_whole, writing_to

    with writing_to(path, "name another file with --to FILE"):
        make_private(path.absolute().parent)
        write_whole(path, page)
    print(f"{plain(str(path))} ({human_size(len(page))})")


def open_in_browser(path: Path) -> None:
    """Open a page in the browser, or print its path if no browser is found."""
    import webbrowser

    opened = False
    with contextlib.suppress(webbrowser.Error, OSError):
        opened = webbrowser.open(path.absolute().as_uri())
    if not opened:
        say(f"no browser was found here; open {path.absolute()}", sys.stderr)


def _named_runs(arguments: ReportArguments) -> list[NamedRun]:
    folder = Path(arguments.runs)
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
