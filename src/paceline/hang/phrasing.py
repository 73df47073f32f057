"""How ranks are spoken of in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.flight_recorder import Collective
from paceline.hang.rank_report import RankReport


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as people say them.

    >>> format_ranks([3]), format_ranks([0, 1, 2, 5]), format_ranks([0, 2])
    ('rank 3', 'ranks 0-2, 5', 'ranks 0, 2')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'' if len(ranks) == 1 else 's'} {words}"


def ranks_but(records: Sequence[RankReport], some: Sequence[RankReport]) -> tuple[int, ...]:
    """Return the numbers of all others."""
    return tuple(record.rank for record in records if record not in some)


def named(records: Sequence[RankReport]) -> str:
    """Return ranks with their nodes."""
    nodes = sorted({record.node for record in records})
    return f"{format_ranks([record.rank for record in records])} (node {', '.join(nodes)})"


def place_words(record: RankReport) -> str:
    """Return where a rank is, as the end of a sentence."""
    return f"; it is in {record.place}" if record.place else ""


def are(some: Sequence[object]) -> str:
    """Return the verb that fits one or many."""
    return "is" if len(some) == 1 else "are"


def wait_words(others: Sequence[int], some: Sequence[RankReport]) -> str:
    """Return who waits for whom."""
    return f"{format_ranks(others)} wait{'s' if len(others) == 1 else ''} for {'it' if len(some) == 1 else 'them'}"


def workers_words(record: RankReport) -> str:
    """Return which of the processes that it started do not move."""
    bad = [child for child in record.children if child.state in {"T", "t", "Z", "D"}]
    return f", and its process {bad[0].pid} {bad[0].description}" if bad else ""


def with_size(entry: Collective) -> str:
    """Return a collective, with what it was given."""
    return f"{entry.label} of {', '.join('x'.join(map(str, shape)) or '1' for shape in entry.sizes)} {'/'.join(entry.types)}"
