"""`paceline scale`: measure speed-up and efficiency by number of ranks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.verify import check_at_least, program_from, progress, worlds_from
from paceline.cluster.allocation import allocation_from
from paceline.config.arguments import option, positional, verbatim
from paceline.measure.efficiency import Scaling
from paceline.measure.scaling import Study, run_study
from paceline.measure.scaling_page import to_html
from paceline.measure.scaling_report import plot_of, print_study, to_markdown
from paceline.measure.scaling_store import read_studies, write_studies
from paceline.rundir import RunDir, make_private, write_whole, writing_to

_ELSEWHERE = "give another folder with --to FOLDER"


@dataclass(frozen=True, kw_only=True)
class ScaleArguments:
    """Writes the scaling report that computing centres ask for: speed-up, efficiency, and where the time goes."""

    script: str = positional(metavar="SCRIPT")
    """Script to run, or the name of a recipe."""
    script_arguments: tuple[str, ...] = verbatim("ARGUMENT")
    """Arguments of the script, such as settings (key=value). Options of paceline come before SCRIPT."""
    worlds: str = option("1,2,4", metavar="N,N")
    """World sizes to measure; the smallest is the baseline."""
    weak: bool = False
    """Weak scaling: batch.global_size and batch.lanes grow with the number of ranks."""
    rounds: int = 3
    """Runs per world size."""
    steps: int = 40
    """Timed steps per run."""
    warmup: int = 10
    """Warm-up steps per run."""
    to: str = option("", metavar="FOLDER")
    """Folder for the results (default: runs/NAME)."""
    json: bool = False
    """Print the study as JSON."""


def main(arguments: ScaleArguments) -> int:
    """Run the study, print it and write the report."""
    check_at_least(1, "--rounds", arguments.rounds)
    check_at_least(1, "--steps", arguments.steps)
    check_at_least(0, "--warmup", arguments.warmup)
    study = Study(
        program_from(arguments.script),
        arguments.script_arguments,
        tuple(sorted(worlds_from(arguments.worlds))),
        weak=arguments.weak,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        steps=arguments.steps,
        allocation=allocation_from(os.environ),
        progress=progress(quiet=arguments.json),
    )
    if arguments.to:
        with writing_to(Path(arguments.to), _ELSEWHERE):
            make_private(Path(arguments.to))
    scaling = run_study(study)
    if arguments.json:
        print(json.dumps(scaling.as_dict(), indent=2))
    else:
        print_study(scaling)
    file = RunDir(Path(arguments.to or Path("runs") / scaling.name)).scaling
    _write(scaling, file)
    if not arguments.json:
        print(f"\nreport: {file.with_suffix('.html')}")
    return 0


def _write(scaling: Scaling, file: Path) -> None:
    """Write the study, and a report that includes an earlier study of the other kind (strong or weak)."""
    with writing_to(file.parent, _ELSEWHERE):
        make_private(file.parent)
        studies = read_studies(file) | {scaling.kind: scaling}
        for kind, study in studies.items():
            write_whole(file.with_name(f"scaling-{kind}.svg"), plot_of(study).encode())
        write_whole(file.with_suffix(".md"), to_markdown(list(studies.values())).encode())
        write_whole(file.with_suffix(".html"), to_html(list(studies.values())).encode())
        write_studies(file, studies)
