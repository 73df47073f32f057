"""Which collectives ranks have begun, and which of them do not end."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.hang.flight import Collective
from paceline.hang.record import Record

Form = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Name, sizes and types."""


def groups_of(records: Iterable[Record]) -> list[str]:
    """Return the groups in which any rank has begun a collective."""
    return sorted({entry.group for record in records for entry in record.collectives})


def last_of(record: Record, group: str) -> Collective | None:
    """Return the first collective of a group that does not end, else the last."""
    mine = [entry for entry in record.collectives if entry.group == group]
    return next((entry for entry in mine if not entry.done), mine[-1] if mine else None)


def pending_of(record: Record) -> Collective | None:
    """Return the first collective of a rank that does not end."""
    return next((entry for entry in record.collectives if not entry.done), None)


def form_of(entry: Collective) -> Form:
    """Return what must be the same on all ranks."""
    return entry.name, entry.sizes, entry.types
