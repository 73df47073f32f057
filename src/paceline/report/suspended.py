"""The processes of a live run on this host, and why it makes no progress: suspended, or unresponsive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.hang.proc import GONE
from paceline.hang.rank_report import read_reports
from paceline.hang.verdict import HangVerdict, plural, with_nodes
from paceline.report.jobs import RunJob
from paceline.rundir import RunDir

Standstill = Literal["suspended", "unresponsive"]

_BY_SLURM = {"SUSPENDED", "STOPPED"}
_STOPPED = {"T", "t"}
_ELSEWHERE = {"", GONE, "Z"}
_MOST_RANKS = 16


def rank_pids(folder: RunDir, ranks: int) -> tuple[int, ...]:
    """Return the processes of the ranks, if all of them run on this host; of a large world none."""
    reports = read_reports(folder) if 0 < ranks <= _MOST_RANKS else []
    here = [report.process.pid for report in reports if report.process.state not in _ELSEWHERE]
    return tuple(here) if len(here) == ranks else ()


def standstill(
    folder: RunDir, jobs: Sequence[RunJob], hang: HangVerdict | None, quiet_s: float, long_s: float
) -> tuple[Standstill, str] | None:
    """Return the state of a live run that does not move, and why; None if nothing is known to be wrong.

    The processes of this host are looked at only after `long_s` seconds without an event or a heartbeat.
    """
    for job in jobs:
        if job.state in _BY_SLURM:
            return "suspended", f"Slurm: job {job.job} is {job.state}"
    reports = read_reports(folder) if quiet_s > long_s else []
    if stopped := [report for report in reports if report.process.state in _STOPPED]:
        pids = " ".join(str(report.process.pid) for report in stopped)
        verb = plural(stopped, "is", "are")
        return "suspended", f"{with_nodes(stopped)} {verb} stopped; continue with kill -CONT {pids}"
    return ("unresponsive", "") if hang and hang.found else None
