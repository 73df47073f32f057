"""Spans of time: what they cover together, what is in both, what is left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the same time as spans that do not touch, in order.

    >>> union([(3, 4), (0, 2), (1, 3), (6, 7), (8, 8)])
    [(0, 4), (6, 7)]
    """
    found: Spans = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def intersection(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Spans:
    """Return what is in two unions.

    >>> intersection([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(1, 2), (3, 4), (6, 7)]
    """
    found: Spans = []
    mine = theirs = 0
    while mine < len(one) and theirs < len(other):
        begin, end = max(one[mine][0], other[theirs][0]), min(one[mine][1], other[theirs][1])
        if begin < end:
            found.append((begin, end))
        if one[mine][1] < other[theirs][1]:
            mine += 1
        else:
            theirs += 1
    return found


def difference(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Spans:
    """Return what is in the first union and not in the second.

    >>> difference([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(0, 1), (2, 3), (7, 9)]
    """
    if not one:
        return []
    edge = one[0][0], one[-1][1]
    cuts = [edge[0], *(moment for span in other for moment in span), edge[1]]
    gaps = [(begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=True) if begin < end]
    return intersection(one, gaps)


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long all of them are together."""
    return sum(end - begin for begin, end in spans)
