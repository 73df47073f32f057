"""Whose size it was that made gloo abort a rank: one that gets more than it has room for is ended at once, and says nothing."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.crash import ABORTED
from paceline.hang.entered import expected, form_of
from paceline.hang.flight_recorder import Collective
from paceline.hang.phrasing import format_ranks, named, ranks_but, with_size
from paceline.hang.rank_report import RankReport
from paceline.hang.stacks import MAIN, Stack
from paceline.hang.verdict import HangVerdict

_INNERMOST = 6
_COLLECTIVE = (
    "/torch/distributed/",
    "/paceline/train/bucket_exchange.py",
    "/paceline/world/collectives.py",
)
_NEWEST = 5  # so many collectives a rank may have got on before it hears that another is gone


def whose_size_aborted(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return who gave another size than before. The rank that gloo ended is at fault only if nobody else did."""
    dead = [
        record
        for record in records
        if record.crash == ABORTED and any(map(_in_collective, record.stacks))
    ]
    told = {record: _unheard_of(record) for record in records if record.collectives}
    if not dead or not told:
        return None
    end = f"{named(dead[:1])} was aborted in a collective, in {dead[0].place}"
    odd = {record: entry for record, (entry, usual) in told.items() if entry and usual}
    first_time = {record: entry for record, (entry, usual) in told.items() if entry and not usual}
    if odd:
        return _of_odd(records, odd, end)
    if first_time:
        record, entry = next(iter(first_time.items()))
        words = f"{end}: {format_ranks([record.rank])} had {with_size(entry)}, and it another size; none was there before"
        return HangVerdict("another shape", tuple(sorted({record.rank, dead[0].rank})), (), words)
    words = f"{end}: gloo does that where sizes differ, and those of {format_ranks([r.rank for r in told])} are as before"
    return HangVerdict("another shape", (dead[0].rank,), ranks_but(records, dead[:1]), words)


def _of_odd(
    records: Sequence[RankReport], odd: dict[RankReport, Collective], end: str
) -> HangVerdict:
    first, entry = next(iter(odd.items()))
    usual = _unheard_of(first)[1]
    words = f"{named([first])} had {with_size(entry)}, where {with_size(usual) if usual else ''} came before; {end}"
    return HangVerdict(
        "another shape", tuple(record.rank for record in odd), ranks_but(records, list(odd)), words
    )


def _in_collective(stack: Stack) -> bool:
    innermost = stack.places[-_INNERMOST:]
    return stack.thread == MAIN and any(
        part in place.file for place in innermost for part in _COLLECTIVE
    )


def _unheard_of(record: RankReport) -> tuple[Collective | None, Collective | None]:
    """Return the last collective of a form that had never been, and the one of the same name that was to be expected."""
    for place in reversed(
        range(max(0, len(record.collectives) - _NEWEST), len(record.collectives))
    ):
        entry, before = record.collectives[place], record.collectives[:place]
        if before and form_of(entry) not in map(form_of, before):
            usual = expected(before)
            return entry, usual if usual and usual.name == entry.name else None
    return None, None
