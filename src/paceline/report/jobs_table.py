"""All runs that were submitted to Slurm as a table: one row per run, across requeues and chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.report.jobs import GONE, UNKNOWN, RunJob
from paceline.report.state import RunState
from paceline.terminal import plain, table
from paceline.units import human_loss

_HEAD = ("run", "jobs", "state", "step", "loss", "used", "left", "starts", "log")
_DROPPABLE = ("log", "starts", "used", "loss", "left")
_RECENT_S = 86400.0
_STATUS = {"ended": "finished", "not started": "never started"}
_NOT_IN_JSON = {"losses", "log_tail", "slowest"}


def is_current(state: RunState) -> bool:
    """Return whether `paceline jobs` lists a run by default: it has a live job, or was active within a day."""
    return bool(state.live_jobs) or state.quiet_s < _RECENT_S


def print_jobs(states: Sequence[RunState]) -> None:
    """Print one row per run, then why jobs could not be launched."""
    table(_HEAD, [_row(state) for state in states], droppable=_DROPPABLE)
    for state in states:
        job = _main_job(state)
        if note := job.problem or ("" if state.total_steps else state.reason):
            print(f"{plain(state.name)}, job {job.job}: {plain(note)}")


def _row(state: RunState) -> tuple[str, ...]:
    first = _main_job(state)
    jobs = state.live_jobs or [first]
    return (
        state.name,
        ",".join(job.job for job in jobs),
        status_of(state),
        f"{state.step:,}/{state.total_steps:,}" if state.total_steps else "-",
        human_loss(state.loss) if math.isfinite(state.loss) else "-",
        first.used or "-",
        first.left or "-",
        str(state.restarts + 1 if state.total_steps else 0),
        first.log if first.live else state.log,
    )


def _main_job(state: RunState) -> RunJob:
    """Return the job that runs, else the first that waits, else the last one."""
    live = state.live_jobs
    return next((job for job in live if job.runs), live[0] if live else state.jobs[-1])


def status_of(state: RunState) -> str:
    """Return Slurm's state while the run has a job, else how the run ended by its events."""
    job, live = _main_job(state), state.live_jobs
    if live and job.state == UNKNOWN:
        return f"{_STATUS.get(state.phase, state.phase)} (by its files)"
    if live:
        reason = f" ({job.reason})" if job.reason else ""
        more = f", {len(live) - 1} more waiting" if len(live) > 1 else ""
        return f"{job.state}{reason}{more}"
    if state.phase in {"ended", "failed", "stopped"} or job.state == GONE:
        return _STATUS.get(state.phase, state.phase)
    return job.state.lower()


def as_dicts(states: Sequence[RunState]) -> list[dict[str, Any]]:
    """Return the runs with the keys of docs/json.md."""
    runs = []
    for state in states:
        run = {name: value for name, value in state.facts().items() if name not in _NOT_IN_JSON}
        runs.append(run | {"stands": status_of(state)})
    return runs
