"""Markdown that a Git host and the site render alike."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence


def code(words: str) -> str:
    """Return text as code. A bar ends a table cell even within backticks, so it becomes an entity.

    >>> code("-n 2"), code("list|check")
    ('`-n 2`', '<code>list&#124;check</code>')
    """
    return (
        f"<code>{html.escape(words).replace('|', '&#124;')}</code>"
        if "|" in words
        else f"`{words}`"
    )


def text(words: str) -> str:
    r"""Return text on one line with Markdown escaped; parts in backticks stay code.

    >>> print(text("a * b, [c], all_reduce and `d_*`"))
    a \* b, \[c\], all_reduce and `d_*`
    """
    parts = re.split(r"`([^`]+)`", " ".join(words.split()))
    plain = [
        re.sub(r"([*<\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", part).replace("|", "&#124;")
        for part in parts[::2]
    ]
    quoted = [*map(code, parts[1::2]), ""]
    return "".join(piece for pair in zip(plain, quoted, strict=True) for piece in pair)


def sentence(words: str) -> str:
    """Return text with a capital letter and a full stop.

    >>> sentence("the same bits?"), sentence("fetch a dataset")
    ('The same bits?', 'Fetch a dataset.')
    """
    return words and words[0].upper() + words[1:] + ("" if words.endswith((".", "?", "!")) else ".")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def line(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"
