"""How help is laid out, for the program, its verbs and the settings of a run. Imports fast."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_MOST_COLUMNS = 100
NAME_COLUMNS = 26


def section(title: str, rows: Sequence[tuple[str, str]], columns: int = NAME_COLUMNS) -> str:
    """Return a titled list: names at the left, their help wrapped at the right."""
    if not rows:
        return ""
    lines = [f"{title}:"]
    for name, text in rows:
        lines += _entry(name, text, columns)
    return "\n".join(lines)


def _entry(name: str, text: str, columns: int) -> list[str]:
    head = f"  {name}"
    indent = " " * columns
    lines = textwrap.wrap(
        text, _columns(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    if lines and len(head) + 2 <= columns:
        lines[0] = head.ljust(columns) + lines[0].lstrip()
        return lines
    return [head, *lines]


def wrapped(text: str) -> str:
    """Return text wrapped at the width of the terminal; blank lines separate paragraphs."""
    width = _columns()
    paragraphs = text.split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(each.split()), width) for each in paragraphs)


def sentence(text: str) -> str:
    """Return a help line as a wrapped sentence.

    >>> sentence("list the cluster profiles")
    'List the cluster profiles.'
    """
    capital = text[:1].upper() + text[1:]
    return wrapped(capital if capital.endswith((".", "?", "!")) else f"{capital}.")


def _columns() -> int:
    return min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
