"""Which rank says nothing though others are stuck: stopped, gone, done, or where Python cannot speak."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.entered import pending_of
from paceline.hang.phrasing import format_ranks, named, ranks_but, wait_words
from paceline.hang.process import GONE
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import Cause, HangVerdict


def who_is_silent(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return those that wrote nothing though others are stuck: stopped, gone, or where Python cannot speak."""
    missing = sorted(set(range(records[0].size)) - {record.rank for record in records})
    silent = [record for record in records if record.state in {"running", "moving"}]
    if not silent:
        return _never_came(records, missing) if missing else None
    by_state = {record.process.state: record for record in silent}
    for state, cause in (("T", "stopped"), ("t", "stopped"), (GONE, "gone"), ("Z", "gone")):
        if state in by_state:
            of_this = [record for record in silent if record.process.state == state]
            return _quiet(cause, of_this, records, _end_words(by_state[state]))  # type: ignore[arg-type]
    words = silent[0].process.description
    return _quiet(
        "silent",
        silent,
        records,
        f"says nothing{f' (its process {words})' if words else ''}: it is in native code, or cut off",
    )


def _end_words(record: RankReport) -> str:
    if not record.crash:
        return record.process.description
    return f"was ended by a crash ({record.crash}){f' in {record.place}' if record.place else ''}"


def _quiet(
    cause: Cause, silent: list[RankReport], records: Sequence[RankReport], words: str
) -> HangVerdict:
    others = ranks_but(records, silent)
    plural = (
        words if len(silent) == 1 else words.replace("is ", "are ", 1).replace("says", "say", 1)
    )
    step = f" since step {silent[0].step}" if silent[0].step else ""
    return HangVerdict(
        cause, tuple(record.rank for record in silent), others,
        f"{named(silent)} {plural}{_entered_not(silent, records)}{step}; {wait_words(others, silent)}",
    )  # fmt: skip


def _entered_not(silent: list[RankReport], records: Sequence[RankReport]) -> str:
    waits = [entry for record in records if record not in silent and (entry := pending_of(record))]
    return (
        f" and does not answer in {max(waits, key=lambda entry: entry.number).label}"
        if waits
        else ""
    )


def _never_came(records: Sequence[RankReport], missing: list[int]) -> HangVerdict:
    others = tuple(record.rank for record in records)
    return HangVerdict(
        "silent", tuple(missing), others,
        f"{format_ranks(missing)} has left no word in this folder: it did not begin, or writes elsewhere; "
        f"{format_ranks(others)} wait{'s' if len(others) == 1 else ''}",
    )  # fmt: skip


def who_left(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return those that are done while others still wait for them."""
    left = [record for record in records if record.state == "left"]
    others = ranks_but(records, left)
    if not left or not others:
        return None
    waiting = next(record for record in records if record.rank in others)
    entry = pending_of(waiting)
    return HangVerdict(
        "left", tuple(record.rank for record in left), others,
        f"{named(left)} {'has' if len(left) == 1 else 'have'} left after step {left[0].step}; "
        f"{format_ranks(others)} still wait{'s' if len(others) == 1 else ''}{f' in {entry.label}' if entry else ''}",
    )  # fmt: skip
