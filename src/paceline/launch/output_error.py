"""The error of a rank that cannot report it, from the last lines of its output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_HEAD = "Traceback (most recent call last):"
_NAME = re.compile(r"(?:\w+\.)*(\w+)(?::|$)")
_RANK = re.compile(r"\[rank\d+\]: ")
"""What torch puts before every line of a traceback once a process group exists."""


class OutputError(NamedTuple):
    """An uncaught exception."""

    what: str
    """The class of the exception."""
    text: str
    """The traceback, and all lines after it."""


def error_in(lines: Sequence[str]) -> OutputError | None:
    """Return the last traceback in the output of a rank.

    >>> error_in(["begun", "Traceback (most recent call last):", "  File x", "KeyError: 'a'"]).what
    'KeyError'
    >>> error_in(["[rank1]: Traceback (most recent call last):", "[rank1]: KeyError: 'a'"]).what
    'KeyError'
    """
    lines = [_RANK.sub("", line, count=1) if _RANK.match(line) else line for line in lines]
    heads = [place for place, line in enumerate(lines) if line.startswith(_HEAD)]
    if not heads:
        return None
    trace = lines[heads[-1] :]
    for line in trace[1:]:
        found = _NAME.match(line)
        if found and not line.startswith(" "):
            return OutputError(found[1], "\n".join(trace))
    return None
