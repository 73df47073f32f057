"""All runs of a folder as a table on a terminal or in a pipe: one row per run, newest first."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from paceline.report.dashboard import pids_line
from paceline.report.runs import RunSummary
from paceline.terminal import console, fit, plain, table
from paceline.units import human_loss, human_size, human_time

_HEAD = ("run", "state", "step", "loss", "time", "size", "checkpoints", "started")
_DROPPABLE = ("started", "time", "checkpoints", "size", "loss", "step")
_NUMERIC = ("step", "loss", "size")
_EXPLAINED = {"failed", "lost", "unresponsive", "suspended", "damaged"}
_LOST = "it was killed, or its node went down"


def print_runs(runs: Sequence[RunSummary]) -> None:
    """Print one row per run, then why runs failed, and the processes of those that run here."""
    table(_HEAD, [_row(run) for run in runs], droppable=_DROPPABLE, numeric=_NUMERIC)
    for run in runs:
        if run.status in _EXPLAINED:
            reason = run.damage or run.state.reason or (_LOST if run.status == "lost" else "")
            _print_line(f"{run.state.name}: {reason}" if reason else "")
        if run.state.pids:
            _print_line(f"{run.state.name}: processes {pids_line(run.state.pids)}")


def _print_line(text: str) -> None:
    """Print a line; a terminal shows as much of it as fits."""
    if text:
        print(fit(text, console().width) if sys.stdout.isatty() else plain(text))


def _row(run: RunSummary) -> tuple[str, ...]:
    state = run.state
    return (
        state.name,
        run.status,
        f"{state.step:,}/{state.total_steps:,}" if state.total_steps else "-",
        human_loss(state.loss) if math.isfinite(state.loss) else "-",
        human_time(run.trained_s) if state.total_steps else "-",
        human_size(run.size_bytes),
        checkpoints_of(run),
        f"{human_time(time.time() - run.started_s)} ago" if run.started_s else "-",
    )


def checkpoints_of(run: RunSummary) -> str:
    """Return the number of checkpoints, and how many of them are damaged."""
    if run.checkpoints is None:
        return "remote"
    damaged = f", {run.damaged_checkpoints} damaged" if run.damaged_checkpoints else ""
    return f"{run.checkpoints}{damaged}"
