"""Write one HTML file that shows a run, or several beside each other: no server, no network, nothing to install."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.errors import ConfigError, did_you_mean
from paceline.report.failure import ensure_failure_page
from paceline.report.find_run import NamedRun, find_run
from paceline.terminal import plain
from paceline.units import human_size

HELP = "one HTML file that shows a run, or several: curves, times, ranks, restarts, settings"

_OPTIONS = ("--to", "--runs", "--json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "names", nargs="*", metavar="RUN", help="names or folders of runs, or ids of jobs"
    )
    parser.add_argument(
        "--runs", default="runs", metavar="FOLDER", help="where runs are (default: runs)"
    )
    parser.add_argument(
        "--to",
        metavar="FILE",
        help="the file to write (default: report.html in the run's folder; of several, beside the first)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the same facts as JSON, and write no file"
    )


def main(known: argparse.Namespace) -> int:
    """Write the page, or print the facts."""
    targets = _targets(known)
    from paceline.report.page.page_data import (
        report_data,
    )  # with NumPy, which other verbs need not wait for

    facts = report_data(targets)
    if known.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return 0
    from paceline.report.page.document import render_page
    from paceline.rundir import make_private, write_whole, writing_to

    path, page = _place(known.to, targets), render_page(facts)
    with writing_to(path, "name another file with --to FILE"):
        make_private(path.absolute().parent)
        write_whole(path, page)
    print(f"{plain(str(path))} ({human_size(len(page))})")
    for target in targets:
        if ensure_failure_page(target):
            print(f"{plain(target.name)} failed: {plain(str(target.folder.failure))}")
    return 0


def _targets(known: argparse.Namespace) -> list[NamedRun]:
    for word in known.arguments:
        raise ConfigError(f"there is no option {word}", fix=did_you_mean(word, _OPTIONS))
    if not known.names:
        raise ConfigError("which run?", fix="name a run or its folder: paceline report runs/NAME")
    found = [find_run(name, Path(known.runs)) for name in known.names]
    return list({target.folder.root.resolve(): target for target in found}.values())


def _place(to: str | None, targets: list[NamedRun]) -> Path:
    if to:
        return Path(to)
    first = targets[0].folder
    return first.report if len(targets) == 1 else first.root.parent / first.report.name
