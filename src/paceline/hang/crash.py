"""Crashes in native code (SIGSEGV, SIGABRT): Python's faulthandler writes the stacks of a rank into a file."""

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
from paceline.safe_open import open_to_write, reading

ABORTED = "Aborted"
_MOST_BYTES = 1 << 20
_ERROR = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Crash:
    """A crash in native code, with the Python stacks at that moment."""

    what: str
    """Aborted, Segmentation fault, Bus error ..."""
    stacks: tuple[Stack, ...]


@contextlib.contextmanager
def dump_stacks_on_crash(path: Path, *, enabled_by_us: bool) -> Iterator[None]:
    """Send the faulthandler's output to a file inside the context; the file is removed at the end if nothing crashed.

    A faulthandler that the user enabled keeps its own output.
    """
    was_enabled, file = faulthandler.is_enabled(), -1
    if was_enabled and not enabled_by_us:
        yield
        return
    with contextlib.suppress(OSError):  # a full disk must not fail the training
        make_private(path.parent)
        file = open_to_write(path, os.O_WRONLY | os.O_TRUNC)
        faulthandler.enable(file)
    try:
        yield
    finally:
        if file >= 0:
            _restore(was_enabled=was_enabled)
            os.close(file)
            path.unlink(missing_ok=True)


def _restore(*, was_enabled: bool) -> None:
    faulthandler.disable()
    if was_enabled and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


def read_crash(path: Path) -> Crash | None:
    """Return the crash in a faulthandler file; None if there was none."""
    try:
        with reading(path) as file:
            return parse_crash(file.read(_MOST_BYTES).decode(errors="replace"))
    except OSError:
        return None


def parse_crash(text: str) -> Crash | None:
    r"""Parse the faulthandler's text.

    >>> parse_crash('Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n')
    Crash(what='Aborted', stacks=(Stack(thread='MainThread', places=(CodeLine(file='a.py', line=3, function='f', kind='user'),)),))
    """
    error = _ERROR.search(text)
    if error is None:
        return None
    return Crash(error[1], parse_stacks(text[error.end() :]))


def parse_stacks(text: str) -> tuple[Stack, ...]:
    """Parse the stacks in the faulthandler's text. It lists the youngest thread first, the main thread last."""
    threads = [block for block in text.split("\n\n") if _FRAME.search(block)]
    stacks = []
    for index, block in enumerate(threads):
        name = MAIN if index == len(threads) - 1 else f"thread {index}"
        stacks.append(Stack(name, _places(block)))
    return tuple(stacks)


def _places(block: str) -> tuple[CodeLine, ...]:
    places = []
    for file, line, function in reversed(_FRAME.findall(block)):
        places.append(CodeLine(file, int(line), function, kind_of(file)))
    return tuple(places)
