"""Sets of time intervals: union, intersection, difference and total length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the same time as disjoint intervals in order.

    >>> union([(3, 4), (0, 2), (1, 3), (6, 7), (8, 8)])
    [(0, 4), (6, 7)]
    """
    merged: Spans = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> Spans:
    """Return the time that is in both of two unions.

    >>> intersection([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(1, 2), (3, 4), (6, 7)]
    """
    common: Spans = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> Spans:
    """Return the time that is in the first union and not in the second.

    >>> difference([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(0, 1), (2, 3), (7, 9)]
    """
    if not first:
        return []
    cuts = [first[0][0]]
    for span in second:
        cuts += span
    cuts.append(first[-1][1])
    pairs = zip(cuts[::2], cuts[1::2], strict=True)
    gaps = [(begin, end) for begin, end in pairs if begin < end]
    return intersection(first, gaps)


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the lengths of intervals."""
    return sum(end - begin for begin, end in spans)
