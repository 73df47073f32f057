"""Which rank is stuck, why, and who waits for it: one sentence from what all ranks wrote down."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.aborted import whose_size_aborted
from paceline.hang.cut import which_link_is_cut
from paceline.hang.late import which_link, who_is_late, whose_batches_differ
from paceline.hang.odds import who_is_at_odds
from paceline.hang.own_words import who_failed, who_is_quiet_longest, whose_save_hangs
from paceline.hang.rank_report import RankReport
from paceline.hang.silence import who_is_silent, who_left
from paceline.hang.verdict import HangVerdict

_FRESH_S = 8.0  # ranks that are stuck ask again every 2 s; clocks may differ
_QUESTIONS = (
    whose_batches_differ, who_is_at_odds, whose_size_aborted, who_failed, which_link_is_cut, who_is_silent, who_is_late, whose_save_hangs, who_left, which_link,
)  # fmt: skip


def judge(records: Sequence[RankReport]) -> HangVerdict:
    """Return what holds a run up. What explains the rest is asked for first."""
    if not any(record.state in {"stuck", "failed"} for record in records):
        return HangVerdict("none", (), (), "no rank has said that it is stuck")
    for question in _QUESTIONS:
        if verdict := question(records):
            return verdict
    return who_is_quiet_longest(records)


def still_moving(records: Sequence[RankReport], now_s: float) -> list[int]:
    """Return the ranks that have just said that they move: others wait for them, and nothing is wrong."""
    return [record.rank for record in records if moves(record, now_s)]


def moves(record: RankReport, now_s: float) -> bool:
    """Return whether a rank has just said that it moves. One that was stopped after it had said so does not say it again."""
    return record.state == "moving" and now_s - record.time_s < _FRESH_S
