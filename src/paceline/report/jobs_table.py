"""All my runs that were given to Slurm: one row each, across requeues and chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.report.jobs import GONE, RunJob
from paceline.report.state import RunState
from paceline.terminal import plain
from paceline.units import human_loss

_HEAD = ("run", "jobs", "state", "step", "loss", "used", "left", "starts", "log")
_RECENT_S = 86400.0


def is_current(state: RunState) -> bool:
    """Return whether a run is listed without being asked for: it has a live job, or its last word is of today."""
    return bool(state.live_jobs) or state.quiet_s < _RECENT_S


def table_of(states: Sequence[RunState]) -> list[str]:
    """Return the rows as aligned lines, head first."""
    rows = [_HEAD, *(tuple(map(plain, _row(state))) for state in states)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(state: RunState) -> tuple[str, ...]:
    first = _first(state)
    shown = state.live_jobs or [first]
    ids = ",".join(job.job for job in shown)
    step = f"{state.step:,}/{state.total_steps:,}" if state.total_steps else "-"
    loss = human_loss(state.loss) if math.isfinite(state.loss) else "-"
    starts = str(state.restarts + 1 if state.total_steps else 0)
    log = first.log if first.live else state.log
    return (
        state.name,
        ids,
        status_of(state),
        step,
        loss,
        first.used or "-",
        first.left or "-",
        starts,
        log,
    )


def _first(state: RunState) -> RunJob:
    """Return the job that matters: the one that runs, else the first that waits, else the last."""
    live = state.live_jobs
    return next((job for job in live if job.runs), live[0] if live else state.jobs[-1])


def status_of(state: RunState) -> str:
    """Return how a run stands, in a few words: as Slurm says while it has a job, as its events say afterwards."""
    first, live = _first(state), state.live_jobs
    if not live:
        how = {
            "ended": "completed",
            "not started": "never started",
            "lost": "gone without a word",
        }.get(state.phase, state.phase)
        told = state.phase in {"ended", "failed", "stopped"} or first.state == GONE
        return how if told else first.state.lower()
    more = len(live) - 1
    reason = f" ({first.reason})" if first.reason else ""
    return f"{first.state}{reason}{f', {more} more waiting' if more else ''}"


def as_dicts(states: Sequence[RunState]) -> list[dict[str, Any]]:
    """Return the same as JSON would have it."""
    left_out = {"losses", "log_tail", "slowest"}
    return [
        {name: value for name, value in state.facts().items() if name not in left_out}
        | {"stands": status_of(state)}
        for state in states
    ]
