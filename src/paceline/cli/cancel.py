"""End all jobs of a run: those that wait first, so that none starts; one that runs is told to save before it leaves."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.watch import add_run_argument, named_run
from paceline.cluster import slurm
from paceline.errors import PacelineError
from paceline.report.find_run import NamedRun, find_run
from paceline.report.jobs import RunJob, jobs_of
from paceline.report.state import is_held
from paceline.rundir import RunDir, make_private, writing_to
from paceline.terminal import plain

HELP = "end all jobs of a run, waiting and running; what runs saves first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")


def main(known: argparse.Namespace) -> int:
    """End the jobs, and say what becomes of each."""
    target = find_run(named_run(known, ("--json", "--runs")), Path(known.runs))
    live = [job for job in jobs_of(target.jobs) if job.live]
    if not live:
        _refuse_what_is_no_job(target)
    waiting, running = [job for job in live if job.waits], [job for job in live if not job.waits]
    if live:
        mark_cancelled(target.folder)
    for jobs in (waiting, running):
        if jobs:
            slurm.cancel([job.job for job in jobs])
    if known.json:
        facts = {"waiting": [job.job for job in waiting], "running": [job.job for job in running]}
        print(
            json.dumps(
                {
                    "run": target.name,
                    "folder": str(target.folder.root.absolute()),
                    "cancelled": facts,
                }
            )
        )
    else:
        print("\n".join(_said(target, waiting, running)))
    return 0


def mark_cancelled(folder: RunDir) -> None:
    """Leave the word that keeps a job which saves and leaves from being requeued."""
    path = folder.jobs / "cancelled"
    with writing_to(path):
        make_private(folder.jobs)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def _refuse_what_is_no_job(target: NamedRun) -> None:
    """Say how a run that trains without Slurm is ended, rather than that there was nothing to do."""
    if not is_held(target.folder.lock):
        return
    holder = "the process that trains it"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = plain(str(json.loads(target.folder.lock.read_bytes())["holder"]))
    raise PacelineError(
        f"{target.name} trains, but not as a job that `paceline submit` has started",
        fix=f"press Ctrl-C where it was started, or send SIGTERM to {holder}: it saves and leaves",
    )


def _said(target: NamedRun, waiting: Sequence[RunJob], running: Sequence[RunJob]) -> list[str]:
    name = plain(target.name)
    if not waiting and not running:
        return [f"{name} has no job in the queue: there is nothing to cancel"]
    lines = [f"job {job.job} was waiting, and will not start" for job in waiting]
    lines += [
        f"job {job.job} was told to save and leave; Slurm ends what is left of it after its grace time (KillWait, 30 s unless set otherwise)"
        for job in running
    ]
    return [*lines, f"{name} is not requeued; `paceline submit` goes on from its newest checkpoint"]
