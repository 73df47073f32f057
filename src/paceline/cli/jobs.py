"""List my runs that were given to Slurm, one line each, across requeues and chains of jobs."""

from __future__ import annotations

import argparse
import json

from paceline.cluster.registry import submissions
from paceline.cluster.slurm import cluster_name
from paceline.errors import ConfigError, did_you_mean
from paceline.report.find_run import group_by_run
from paceline.report.history import History
from paceline.report.jobs import all_jobs
from paceline.report.jobs_table import as_dicts, is_current, print_jobs
from paceline.report.state import RunState, state_of

HELP = "my submitted runs, one line each across requeues: state, step, loss, time left, log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "--all", action="store_true", help="also those that were over more than a day ago"
    )
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")


def main(known: argparse.Namespace) -> int:
    """List the runs, the newest last."""
    for word in known.arguments:
        raise ConfigError(f"unexpected word {word!r}", fix=did_you_mean(word, ["--all", "--json"]))
    states = [state for state in _states() if known.all or is_current(state)]
    if known.json:
        print(json.dumps({"runs": as_dicts(states)}, indent=2))
    elif states:
        print_jobs(states)
    else:
        print(
            "no runs were submitted in the last day; `paceline jobs --all` lists older ones, `paceline submit` starts one"
        )
    return 0


def _states() -> list[RunState]:
    """Return how each submitted run stands; Slurm is asked once for all."""
    sent = submissions(cluster_name())
    found = {job.job: job for job in all_jobs(sent)}
    states = []
    for target in group_by_run(sent):
        history = History(target.folder.events)
        history.read()
        states.append(state_of(target, history, [found[job.job] for job in target.jobs]))
    return states
