"""Whether ranks have begun different things as the same collective, and which of them is at odds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.hang.entered import Form, expected, form_of, groups_of
from paceline.hang.flight_recorder import Collective
from paceline.hang.phrasing import format_ranks, named, place_words, ranks_but, with_size
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import Cause, HangVerdict


def who_is_at_odds(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return that ranks have begun different things as the same collective. Some may have got through with it."""
    for group in groups_of(records):
        mine = {
            record: [entry for entry in record.collectives if entry.group == group]
            for record in records
        }
        pending = [entry.number for entries in mine.values() for entry in entries if not entry.done]
        first = min(pending, default=0)
        entered = {
            record: entry
            for record, entries in mine.items()
            for entry in entries
            if entry.number == first
        }
        before = max(
            ([entry for entry in entries if entry.number < first] for entries in mine.values()),
            key=len,
        )
        if odd := _odd_ones(entered, before):
            return _of_mismatch(entered, odd)
    return None


def _odd_ones(
    entered: dict[RankReport, Collective], before: Sequence[Collective]
) -> list[RankReport]:
    """Return the ranks that do not do what most do. Of as many, those that do not what came before; else all."""
    forms = {record: form_of(entry) for record, entry in entered.items()}
    names = {entry.name for entry in entered.values()}
    if len(set(forms.values())) < 2 or (len(names) == 1 and names <= _MAY_DIFFER):
        return []
    (most_frequent, most), (_, next_most), *_ = Counter(forms.values()).most_common()
    usual = most_frequent if most > next_most else _as_before(set(forms.values()), before)
    if usual:
        return [record for record, form in forms.items() if form != usual]
    sent = [record for record in entered if record.place and record.place.kind == "user"]
    return sent if 0 < len(sent) < len(entered) else list(entered)


def _as_before(forms: set[Form], before: Sequence[Collective]) -> Form | None:
    """Return the one that was to be expected here, or else the only one that has ever been."""
    next_one = expected(before)
    if next_one and form_of(next_one) in forms:
        return form_of(next_one)
    known = forms & set(map(form_of, before))
    return known.pop() if len(known) == 1 else None


_MAY_DIFFER = {"all-to-all", "alltoall", "gather", "scatter", "broadcast", "barrier", "alltoallv"}
"""Here ranks may give different sizes, and nothing is wrong."""


def _of_mismatch(entered: dict[RankReport, Collective], odd: list[RankReport]) -> HangVerdict:
    mine, one = odd[0], entered[odd[0]]
    others = [record for record, entry in entered.items() if form_of(entry) != form_of(one)]
    other = entered[others[0]]
    theirs = [record.rank for record, entry in entered.items() if form_of(entry) == form_of(other)]
    cause: Cause = "another shape" if one.name == other.name else "another collective"
    what = (
        (one.label, other.label) if one.name != other.name else (with_size(one), with_size(other))
    )
    came = "are" if len(theirs) > 1 else "is"
    words = f"{named([mine])} is in {what[0]}, but {format_ranks(theirs)} {came if not other.done else 'had'} {'in ' if not other.done else ''}{what[1]}"
    return HangVerdict(
        cause,
        tuple(record.rank for record in odd),
        ranks_but(list(entered), odd),
        f"{words}{place_words(mine)}",
    )
