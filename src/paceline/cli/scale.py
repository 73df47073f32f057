"""Run a script (or a recipe) at several world sizes and say how much faster it gets: speed-up, efficiency, and where the time goes. Words after it are its own settings."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from paceline.cli.verify import progress, target, worlds_from
from paceline.cluster.allocation import allocation_from
from paceline.errors import ConfigError
from paceline.measure.efficiency import Scaling
from paceline.measure.scaling import Study, run_study
from paceline.measure.scaling_report import plot_of, print_study, to_html, to_markdown
from paceline.measure.scaling_store import read_studies, write_studies
from paceline.rundir import RunDir, make_private, write_whole, writing_to

HELP = (
    "speed-up and efficiency at several world sizes, and the report that computing centres ask for"
)

_ELSEWHERE = "give another folder with --to"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument("script", help="a script, or the name of a recipe")
    parser.add_argument(
        "--worlds", default="1,2,4", help="numbers of ranks; all are compared with the smallest"
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="let batch.global_size and batch.lanes grow with the ranks (weak scaling)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each size is run (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="steps that are timed in a run (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=int, default=10, help="steps before them (default: %(default)s)"
    )
    parser.add_argument(
        "--to", default="", metavar="FOLDER", help="where the results go (default: runs/NAME)"
    )
    parser.add_argument("--json", action="store_true", help="print the study as JSON")


def main(known: argparse.Namespace) -> int:
    """Run the study, show it, and write it down."""
    for name, least in (("rounds", 1), ("steps", 1), ("warmup", 0)):
        if getattr(known, name) < least:
            raise ConfigError(
                f"--{name} {getattr(known, name)} is too small",
                fix=f"give --{name} {least} or more",
            )
    study = Study(
        target(known.script),
        tuple(known.arguments),
        tuple(sorted(worlds_from(known.worlds))),
        weak=known.weak,
        rounds=known.rounds,
        warmup=known.warmup,
        steps=known.steps,
        allocation=allocation_from(os.environ),
        progress=progress(quiet=known.json),
    )
    if known.to:
        with writing_to(Path(known.to), _ELSEWHERE):
            make_private(Path(known.to))
    found = run_study(study)
    if known.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print_study(found)
    file = RunDir(Path(known.to or Path("runs") / found.name)).scaling
    _write(found, file)
    if not known.json:
        print(f"\nthe report: {file.with_suffix('.html')}")
    return 0


def _write(found: Scaling, file: Path) -> None:
    """Write the study beside the other kind, if that was made before; and the report of both."""
    with writing_to(file.parent, _ELSEWHERE):
        make_private(file.parent)
        studies = read_studies(file) | {found.kind: found}
        for kind, study in studies.items():
            write_whole(file.with_name(f"scaling-{kind}.svg"), plot_of(study).encode())
        write_whole(file.with_suffix(".md"), to_markdown(list(studies.values())).encode())
        write_whole(file.with_suffix(".html"), to_html(list(studies.values())).encode())
        write_studies(file, studies)
