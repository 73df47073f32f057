"""What a rank still says when native code ends it (SIGSEGV, SIGABRT): Python's own handler writes its stacks into a file."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.hang.stacks import MAIN, CodeLine, Stack, kind_of
from paceline.rundir import make_private

ABORTED = "Aborted"
_MOST_BYTES = 1 << 20
_WHAT = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Crash:
    """How native code ended a rank, and where its threads were."""

    what: str
    """Aborted, Segmentation fault, Bus error ..."""
    stacks: tuple[Stack, ...]


@contextlib.contextmanager
def dump_stacks_on_crash(path: Path, *, enabled_by_us: bool) -> Iterator[None]:
    """Have crashes written into a file until this is over; a file that stays tells of one.

    Where somebody else has already said where they are to be written, it stays so.
    """
    before, file = faulthandler.is_enabled(), -1
    if before and not enabled_by_us:
        yield
        return
    with contextlib.suppress(OSError):  # a disk that does not take it fails no training
        make_private(path.parent)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.enable(file)
    try:
        yield
    finally:
        if file >= 0:
            _to_the_screen_again(before=before)
            os.close(file)
            path.unlink(missing_ok=True)


def _to_the_screen_again(*, before: bool) -> None:
    faulthandler.disable()
    if before and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


def read_crash(path: Path) -> Crash | None:
    """Return what a crash left; nothing where there was none."""
    try:
        with path.open("rb") as file:
            return parsed_crash(file.read(_MOST_BYTES).decode(errors="replace"))
    except OSError:
        return None


def parsed_crash(text: str) -> Crash | None:
    r"""Return what Python's handler wrote. Threads come youngest first, so the last is the main one.

    >>> parsed_crash('Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n')
    Crash(what='Aborted', stacks=(Stack(thread='MainThread', places=(Place(file='a.py', line=3, function='f', kind='user'),)),))
    """
    if (found := _WHAT.search(text)) is None:
        return None
    threads = [block for block in text[found.end() :].split("\n\n") if _FRAME.search(block)]
    names = [*(f"thread {place}" for place in range(len(threads) - 1)), MAIN]
    return Crash(
        found[1],
        tuple(
            Stack(name, _places(block)) for name, block in zip(names, threads, strict=bool(threads))
        ),
    )


def _places(block: str) -> tuple[CodeLine, ...]:
    frames = _FRAME.findall(block)
    return tuple(
        CodeLine(file, int(line), function, kind_of(file))
        for file, line, function in reversed(frames)
    )
