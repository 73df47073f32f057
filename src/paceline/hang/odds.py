"""Whether ranks have begun different things as the same collective, and which of them is at odds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.hang.entered import form_of, groups_of
from paceline.hang.flight import Collective
from paceline.hang.record import Record
from paceline.hang.verdict import Cause, Verdict
from paceline.hang.words import named, place_words, ranks_but, ranks_words


def who_is_at_odds(records: Sequence[Record]) -> Verdict | None:
    """Return that ranks have begun different things as the same collective. Some may have got through with it."""
    for group in groups_of(records):
        mine = {record: [entry for entry in record.collectives if entry.group == group] for record in records}
        pending = [entry.number for entries in mine.values() for entry in entries if not entry.done]
        first = min(pending, default=0)
        entered = {record: entry for record, entries in mine.items() for entry in entries if entry.number == first}
        if odd := _odd_ones(entered):
            return _of_mismatch(entered, odd)
    return None


def _odd_ones(entered: dict[Record, Collective]) -> list[Record]:
    """Return the ranks that do not do what most do. Of as many, those that the user's own code sent there; else all."""
    kinds = {record: form_of(entry) for record, entry in entered.items()}
    names = {entry.name for entry in entered.values()}
    if len(set(kinds.values())) < 2 or (len(names) == 1 and names <= _MAY_DIFFER):
        return []
    (usual, most), (_, next_most), *_ = Counter(kinds.values()).most_common()
    if most > next_most:
        return [record for record, kind in kinds.items() if kind != usual]
    sent = [record for record in entered if record.place and record.place.kind == "user"]
    return sent if 0 < len(sent) < len(entered) else list(entered)


_MAY_DIFFER = {"all-to-all", "alltoall", "gather", "scatter", "broadcast", "barrier", "alltoallv"}
"""Here ranks may give different sizes, and nothing is wrong."""


def _of_mismatch(entered: dict[Record, Collective], odd: list[Record]) -> Verdict:
    mine, one = odd[0], entered[odd[0]]
    others = [record for record, entry in entered.items() if form_of(entry) != form_of(one)]
    other = entered[others[0]]
    theirs = [record.rank for record, entry in entered.items() if form_of(entry) == form_of(other)]
    cause: Cause = "another shape" if one.name == other.name else "another collective"
    what = (one.called, other.called) if one.name != other.name else (_with_size(one), _with_size(other))
    came = "are" if len(theirs) > 1 else "is"
    words = f"{named([mine])} is in {what[0]}, but {ranks_words(theirs)} {came if not other.done else 'had'} {'in ' if not other.done else ''}{what[1]}"
    return Verdict(
        cause, tuple(record.rank for record in odd), ranks_but(list(entered), odd), f"{words}{place_words(mine)}"
    )


def _with_size(entry: Collective) -> str:
    return f"{entry.called} of {', '.join('x'.join(map(str, shape)) or '1' for shape in entry.sizes)} {'/'.join(entry.types)}"
