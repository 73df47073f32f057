"""The verdict on a run: which rank makes it hang, why, and which ranks wait, from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.collectives import (
    find_another_way,
    find_batch_mismatch,
    find_gloo_abort,
    find_mismatch,
)
from paceline.hang.missing import find_missing
from paceline.hang.network import find_partition, find_stalled_link
from paceline.hang.processes import (
    find_blocked_save,
    find_debugger,
    find_early_exit,
    find_exception,
    find_stopped,
    find_unresponsive,
    longest_idle,
)
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import HangVerdict

_FRESH_S = 8.0  # a stuck rank raises the alarm every 2 s; clocks of nodes may differ

# The order matters: an earlier finding explains the later ones.
_CHECKS = (
    find_debugger,
    find_another_way,
    find_batch_mismatch,
    find_mismatch,
    find_gloo_abort,
    find_exception,
    find_partition,
    find_unresponsive,
    find_missing,
    find_blocked_save,
    find_early_exit,
    find_stalled_link,
)


def judge(reports: Sequence[RankReport]) -> HangVerdict:
    """Return the first cause that explains the reports; cause "none" if no rank is stuck."""
    if not any(report.state in {"stuck", "failed"} for report in reports):
        return find_stopped(reports) or HangVerdict("none", (), (), "no hang detected")
    for check in _CHECKS:
        if verdict := check(reports):
            return verdict
    return longest_idle(reports)


def still_moving(reports: Sequence[RankReport], now_s: float) -> list[int]:
    """Return the ranks that just reported progress: other ranks wait for them, and nothing is wrong."""
    return [report.rank for report in reports if moves(report, now_s)]


def moves(report: RankReport, now_s: float) -> bool:
    """Return whether a rank just reported progress.

    A rank that was stopped since does not repeat it.
    """
    return report.state == "moving" and now_s - report.time_s < _FRESH_S
