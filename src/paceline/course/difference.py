"""What is new in a lesson: the lines that differ from the lesson it extends."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.course.catalog import Lesson, find_lesson

_CONTEXT = 1
"""Unchanged lines that are shown around a change."""


@dataclass(frozen=True)
class DiffLine:
    """One line of a difference."""

    mark: Literal["+", "-", " ", "@"]
    """Added, removed, unchanged, or the name of the place where the next lines stand."""
    text: str


def code_of(source: str) -> tuple[list[str], int]:
    r"""Return the lines of a file below its docstring, and how many lines stand above them.

    >>> code_of('"Title."\n\nx = 1\n')
    (['x = 1'], 2)
    """
    lines = source.splitlines()
    first = ast.parse(source).body[0]
    above = (first.end_lineno or 0) if isinstance(first, ast.Expr) else 0
    while above < len(lines) and not lines[above]:
        above += 1
    return lines[above:], above


def difference(lesson: Lesson) -> list[DiffLine]:
    """Return how a lesson differs from the one that it extends; all its lines if it extends no other."""
    return diff_sources(_earlier(lesson), lesson.source)


def diff_sources(old: str, new: str) -> list[DiffLine]:
    r"""Return how the code of a file differs from that of another; an empty `old` makes every line new.

    >>> [one.mark + one.text for one in diff_sources("def f():\n    a\n    b\n", "def f():\n    a\n    c\n")]
    ['@def f', '     a', '-    b', '+    c']
    """
    after, _ = code_of(new)
    before = code_of(old)[0] if old else []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        line
        for group in matcher.get_grouped_opcodes(_CONTEXT)
        for line in _hunk(group, before, after)
    ]


def new_lines(lesson: Lesson) -> list[int]:
    """Return the numbers, from 1, of the lines of a lesson that the earlier one does not have.

    It is empty for a lesson that extends none.
    """
    if lesson.before is None:
        return []
    after, above = code_of(lesson.source)
    before, _ = code_of(_earlier(lesson))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        above + number + 1
        for tag, _, _, begin, end in matcher.get_opcodes()
        if tag in {"insert", "replace"}
        for number in range(begin, end)
        if after[number].strip()
    ]


def _earlier(lesson: Lesson) -> str:
    if lesson.before is None:
        return ""
    return find_lesson(str(lesson.before), lesson.path.parent).source


def _hunk(
    group: Sequence[tuple[str, int, int, int, int]], before: list[str], after: list[str]
) -> Iterator[DiffLine]:
    place = _enclosing(after, group[0][3])
    if before and place:
        yield DiffLine("@", place)
    for tag, old, old_end, new, new_end in group:
        if tag == "equal":
            yield from (DiffLine(" ", text) for text in after[new:new_end])
            continue
        yield from (DiffLine("-", text) for text in before[old:old_end])
        yield from (DiffLine("+", text) for text in after[new:new_end])


def _enclosing(lines: list[str], number: int) -> str:
    """Return the function or class in which a line stands; empty at the top level."""
    if number >= len(lines) or not lines[number].startswith(" "):
        return ""
    heads = (line for line in reversed(lines[:number]) if line.startswith(("def ", "class ")))
    return next(heads, "").partition("(")[0].rstrip(":")
