"""What ranks say of themselves that explains the rest: an exception, a save that does not end, a place."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.entered import pending_of
from paceline.hang.phrasing import named, ranks_but, wait_words, workers_words
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import HangVerdict

_ENDING = {"saving", "ending"}


def who_failed(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return the first that failed for a reason of its own."""
    failed = [record for record in records if record.wrong and not record.wrong.lost_peer]
    if not failed:
        return None
    first = min(failed, key=lambda record: record.time_s)
    assert first.wrong is not None
    last_line = (
        first.wrong.text.strip().splitlines()[-1] if first.wrong.text.strip() else first.wrong.what
    )
    words = f"{named([first])} failed in step {first.step + 1} with {last_line}"
    return HangVerdict("exception", (first.rank,), ranks_but(records, [first]), words)


def whose_save_hangs(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return whose disk holds the save up: the one whose writer does not wait for another's word."""
    if not any(record.doing in _ENDING for record in records):
        return None
    writers = [
        record for record in records
        if any(stack.thread == "paceline-save" and not _hears(stack.places) for stack in record.stacks)
    ]  # fmt: skip
    if not writers or len(writers) == len(records) > 1:
        return None
    others = ranks_but(records, writers)
    tail = f"; {wait_words(others, writers)}" if others else ""
    sentence = (
        f"{named(writers)} does not get its checkpoint written; it is in {writers[0].place}{tail}"
    )
    return HangVerdict("saving", tuple(record.rank for record in writers), others, sentence)


def _hears(places: Sequence[object]) -> bool:
    return any(getattr(place, "function", "") == "_hear" for place in places)


def who_is_quiet_longest(records: Sequence[RankReport]) -> HangVerdict:
    """Return where the one is that has been quiet for longest: no collective explains it."""
    told = [record for record in records if record.state in {"stuck", "failed"}]
    first = max(told, key=lambda record: (not pending_of(record), record.quiet_s))
    place = f"in {first.place}" if first.place else first.doing
    others = ranks_but(records, [first])
    tail = f"; {wait_words(others, [first])}" if others else ""
    return HangVerdict(
        "stuck",
        (first.rank,),
        others,
        f"{named([first])} does not get on: it is {place}{workers_words(first)}{tail}",
    )
