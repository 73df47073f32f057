"""The error of a rank that cannot report it, from the last lines of its output."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

_HEAD = "Traceback (most recent call last):"
_NAME = re.compile(r"(?:\w+\.)*(\w+)(?::|$)")
_UNINTERESTING = re.compile(r'  File "(?:.*/paceline/launch/|<frozen runpy>|.*/threading\.py")')
_THREADS = ("Thread 0x", "Current thread 0x")
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


def crash_in(lines: Sequence[str]) -> list[str]:
    """Return the output of a rank that died in native code, without the frames that start every rank.

    >>> start = ['  File "/lib/paceline/launch/rank_local.py", line 9 in main', '  File "<frozen runpy>", line 8 in run']
    >>> crash_in(["Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):", *start, "", "Thread 0x2", '  File "a.py", line 1 in f', *start])
    ['Fatal Python error: Aborted', '', 'Thread 0x2', '  File "a.py", line 1 in f']
    """
    told = [
        line
        for line in lines
        if not _UNINTERESTING.match(line) and not line.startswith("Extension modules: ")
    ]
    kept: list[str] = []
    for line, below in itertools.pairwise([*told, ""]):
        is_without_frames = line.startswith(_THREADS) and not below.startswith("  File ")
        is_second_blank = not line and kept[-1:] == [""]
        if not is_without_frames and not is_second_blank:
            kept.append(line)
    return kept[:-1] if kept[-1:] == [""] else kept
