"""`paceline cancel`: cancel a run's jobs; queued jobs first, so that none starts meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cli.named_run import NamedRunArguments, named_run
from paceline.cluster import slurm
from paceline.errors import PacelineError
from paceline.report.find_run import NamedRun
from paceline.report.jobs import RunJob, jobs_of
from paceline.rundir import RunDir, make_private, writing_to
from paceline.runlock import is_held
from paceline.safe_open import open_to_write, read_json
from paceline.terminal import plain


@dataclass(frozen=True, kw_only=True)
class CancelArguments(NamedRunArguments):
    """A cancelled run is not requeued; `paceline submit` resumes it from its newest checkpoint."""

    json: bool = False
    """Print the cancelled jobs as JSON."""


def main(arguments: CancelArguments) -> int:
    """Cancel the jobs; return the exit code."""
    run = named_run(arguments)
    live = [job for job in jobs_of(run.jobs) if job.live]
    if not live:
        _refuse_run_without_job(run)
    waiting = [job for job in live if job.waits]
    running = [job for job in live if not job.waits]
    if live:
        mark_cancelled(run.folder)
    names = {submission.job: submission.name for submission in run.jobs}
    for job in (*waiting, *running):
        slurm.cancel([job.job], names[job.job])
    if arguments.json:
        _print_json(run, waiting, running)
    else:
        print("\n".join(_summary(run, waiting, running)))
    return 0


def mark_cancelled(folder: RunDir) -> None:
    """Write the marker that stops a job from being requeued after it has saved."""
    path = folder.jobs / "cancelled"
    with writing_to(path):
        folder.refuse_links()
        make_private(folder.jobs)
        os.close(open_to_write(path, os.O_WRONLY))


def _refuse_run_without_job(run: NamedRun) -> None:
    """Raise PacelineError if the run trains outside Slurm, with the way to stop it."""
    if not is_held(run.folder.lock):
        return
    holder = "the process that trains it"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = plain(str(read_json(run.folder.lock)["holder"]))
    raise PacelineError(
        f"{run.name} is running, but not as a job of `paceline submit`",
        fix=f"press Ctrl-C where it was started, or send SIGTERM to {holder}: "
        "it saves before it exits",
    )


def _print_json(run: NamedRun, waiting: Sequence[RunJob], running: Sequence[RunJob]) -> None:
    cancelled = {
        "waiting": [job.job for job in waiting],
        "running": [job.job for job in running],
    }
    folder = str(run.folder.root.absolute())
    print(json.dumps({"run": run.name, "folder": folder, "cancelled": cancelled}))


def _summary(run: NamedRun, waiting: Sequence[RunJob], running: Sequence[RunJob]) -> list[str]:
    name = plain(run.name)
    if not waiting and not running:
        return [f"{name} has no job in the queue: there is nothing to cancel"]
    lines = [f"job {job.job} was queued and will not start" for job in waiting]
    grace = "Slurm kills it after its grace time (KillWait, 30 s by default)"
    lines += [f"job {job.job} was asked to save and exit; {grace}" for job in running]
    end = f"{name} is not requeued; `paceline submit` resumes it from its newest checkpoint"
    return [*lines, end]
