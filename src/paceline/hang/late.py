"""Who has not come to the collective in which others wait; and what holds it up if all have."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.entered import groups_of, last_of, pending_of
from paceline.hang.flight_recorder import Collective
from paceline.hang.phrasing import are, format_ranks, named, ranks_but, wait_words, workers_words
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import HangVerdict


def who_is_late(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return those that have not entered the collective in which others wait."""
    for group in groups_of(records):
        entered = {record.rank: last for record in records if (last := last_of(record, group))}
        waits = [entry for entry in entered.values() if not entry.done]
        if not waits:
            continue
        newest = max(waits, key=lambda entry: entry.number)
        late = [
            record
            for record in records
            if record.state != "left" and _is_before(record, entered, newest)
        ]
        if late and len(late) < len(records):
            return _of_late(records, late, newest)
    return None


def _is_before(record: RankReport, entered: dict[int, Collective], newest: Collective) -> bool:
    mine = entered.get(record.rank)
    return mine is None or (mine.done and mine.number < newest.number)


def _of_late(
    records: Sequence[RankReport], late: list[RankReport], newest: Collective
) -> HangVerdict:
    others = ranks_but(records, late)
    doing = {"reading": "reading", "saving": "saving"}.get(late[0].doing, "own code")
    act = {"reading": " reading samples,", "saving": " saving,"}.get(late[0].doing, "")
    where = f"it is{act} in {late[0].place}" if late[0].place else f"it is {late[0].doing}"
    return HangVerdict(
        doing, tuple(record.rank for record in late), others,  # type: ignore[arg-type]
        f"{named(late)} {'has' if len(late) == 1 else 'have'} not entered {newest.label}; {where}{workers_words(late[0])}; {wait_words(others, late)}",
    )  # fmt: skip


def whose_batches_differ(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return that some have ended while others are in one more step: those are at fault who are fewer; of as many, the latter."""
    ended = [record for record in records if record.doing == "ending" and record.state != "failed"]
    more = [record for record in records if record.doing == "step" and pending_of(record)]
    if not ended or not more or len(ended) + len(more) < len(records):
        return None
    if min(record.step for record in more) < max(record.step for record in ended):
        return None
    ended_words = f"ended after step {ended[0].step}"
    step, (early, late) = (
        f"in step {more[0].step + 1}",
        (ranks_but(records, more), ranks_but(records, ended)),
    )
    if len(ended) < len(more):
        words = f"{named(ended)} {ended_words}; {format_ranks(late)} {are(late)} {step}, and wait for a batch of it"
        return HangVerdict("one batch less", early, late, words)
    words = f"{named(more)} has a batch more than the others: it is {step}; {format_ranks(early)} {ended_words}"
    return HangVerdict("one batch more", late, early, words)


def which_link(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return that all have entered a collective which does not end."""
    inside = [record for record in records if pending_of(record)]
    if len(inside) < len(records):
        return None
    pending = {record.rank: entry for record in records if (entry := pending_of(record))}
    first = min(pending.values(), key=lambda entry: entry.number)
    behind = [record for record in records if pending[record.rank].number == first.number]
    nodes = sorted({record.node for record in records})
    between = f"between {' and '.join(nodes)}" if len(nodes) > 1 else "between them"
    if len(behind) < len(records):
        ahead = ranks_but(records, behind)
        return HangVerdict(
            "link", tuple(record.rank for record in behind), ahead,
            f"{named(behind)} {are(behind)} still in {first.label}, which {format_ranks(ahead)} {'has' if len(ahead) == 1 else 'have'} left: the link to it carries nothing",
        )  # fmt: skip
    return HangVerdict(
        "link", tuple(record.rank for record in records), (),
        f"all ranks are in {first.label}, and it does not end: the link {between} carries nothing",
    )  # fmt: skip
