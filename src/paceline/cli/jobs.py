"""`paceline jobs`: list submitted runs, one line each, across requeues and chains of jobs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from paceline.cluster import slurm
from paceline.cluster.registry import submissions
from paceline.report.find_run import group_by_run
from paceline.report.history import History
from paceline.report.jobs import jobs_or_unknown
from paceline.report.jobs_table import as_dicts, is_current, print_jobs
from paceline.report.state import RunState, state_of


@dataclass(frozen=True, kw_only=True)
class JobsArguments:
    """One line per run, across requeues: state, step, loss, time left, log."""

    all: bool = False
    """Also list runs that ended more than a day ago."""
    json: bool = False
    """Print the list as JSON."""


def main(arguments: JobsArguments) -> int:
    """List the runs, newest last."""
    slurm.require("squeue")
    states = [state for state in _states() if arguments.all or is_current(state)]
    if arguments.json:
        print(json.dumps({"runs": as_dicts(states)}, indent=2))
    elif states:
        print_jobs(states)
    else:
        print(
            "no runs were submitted in the last day; "
            "`paceline jobs --all` lists older ones, `paceline submit` starts one"
        )
    if states and states[0].queue_problem:
        print(
            f"Slurm does not answer: {states[0].queue_problem}; "
            "this is what the files of the runs show",
            file=sys.stderr,
        )
    return 0


def _states() -> list[RunState]:
    """Return the state of each submitted run; Slurm is asked once for all."""
    sent = submissions(slurm.cluster_name())
    jobs, problem = jobs_or_unknown(sent)
    by_submission = dict(zip(sent, jobs, strict=True))
    states = []
    for run in group_by_run(sent):
        history = History(run.folder.events)
        history.read()
        of_run = [by_submission[submission] for submission in run.jobs]
        states.append(state_of(run, history, of_run, problem, losses=0))
    return states
