"""Which collectives ranks have begun, and which of them do not end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.hang.flight_recorder import Collective
from paceline.hang.rank_report import RankReport

Form = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Name, sizes and types."""


def groups_of(records: Iterable[RankReport]) -> list[str]:
    """Return the groups in which any rank has begun a collective."""
    return sorted({entry.group for record in records for entry in record.collectives})


def last_of(record: RankReport, group: str) -> Collective | None:
    """Return the first collective of a group that does not end, else the last."""
    mine = [entry for entry in record.collectives if entry.group == group]
    return next((entry for entry in mine if not entry.done), mine[-1] if mine else None)


def pending_of(record: RankReport) -> Collective | None:
    """Return the first collective of a rank that does not end."""
    return next((entry for entry in record.collectives if not entry.done), None)


def form_of(entry: Collective) -> Form:
    """Return what must be the same on all ranks."""
    return entry.name, entry.sizes, entry.types


def expected(before: Sequence[Collective]) -> Collective | None:
    """Return what came next when the last ones had come before: steps repeat. Nothing where the like has not been.

    >>> forms = [Collective("0", n, name, (), (), True) for n, name in enumerate("abcabcab")]
    >>> expected(forms).name, expected(forms[:1]), expected(forms[:3])
    ('c', None, None)
    """
    forms = list(map(form_of, before))
    alike = {place: _alike(forms[:place], forms) for place in range(1, len(forms))}
    best = max(alike, key=lambda place: (alike[place], place), default=0)
    return before[best] if alike.get(best) else None


def _alike(some: Sequence[Form], others: Sequence[Form]) -> int:
    """Return how many of the last are the same."""
    pairs = zip(reversed(some), reversed(others), strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), len(some))
