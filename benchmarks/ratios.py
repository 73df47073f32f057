"""How are repeated measurements told? As a median with its spread, ratios taken within a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Divide round by round: what slowed the machine in a round slowed both.

    >>> ratios([2.0, 6.0], [1.0, 2.0])
    [2.0, 3.0]
    """
    return [value / base for value, base in zip(values, reference, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the range.

    >>> spread([1.0, 3.0, 1.5])
    '1.50 (1.00-3.00)'
    """
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    >>> print(table(["what", "s"], [["a", "1"]]))
    | what | s |
    |---|---|
    | a | 1 |
    """
    lines = [head, *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(head), *text[1:]])


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the names, beginning with another one each round.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    start = number % len(names)
    return [*names[start:], *names[:start]]
