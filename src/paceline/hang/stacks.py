"""Where the threads of this process are in Python, without stopping it; and which frame of a stack tells most."""

from __future__ import annotations

import site
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_MOST_FRAMES = 60
MAIN = "MainThread"


@dataclass(frozen=True)
class CodeLine:
    """A line that is being run."""

    file: str
    line: int
    function: str
    kind: str
    """Whose code it is: user, paceline or library."""

    def __str__(self) -> str:
        return f"{self.function} at {Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """A thread, and where it is, the innermost place last."""

    thread: str
    places: tuple[CodeLine, ...]


def own_stacks() -> list[Stack]:
    """Return where all threads of this process are, but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    names[threading.main_thread().ident] = MAIN
    me = threading.get_ident()
    return [
        Stack(names.get(ident, f"thread {ident}"), _places(frame))
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - the public way to it is this one
        if ident != me
    ]


def _places(frame: FrameType | None) -> tuple[CodeLine, ...]:
    found: list[CodeLine] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        found.append(
            CodeLine(code.co_filename, frame.f_lineno or 0, code.co_name, kind_of(code.co_filename))
        )
        frame = frame.f_back
    return tuple(reversed(found))


_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<frozen"}
)


def kind_of(file: str) -> str:
    """Return whose code a file is.

    >>> kind_of("/home/me/train.py"), kind_of(threading.__file__), kind_of(__file__)
    ('user', 'library', 'paceline')
    """
    if file.startswith(_OURS) and "/recipes/" not in file:
        return "paceline"
    return "library" if file.startswith(_LIBRARIES) else "user"


# What a thread of ours waits for is done by another one.
_DONE_BY = {"checkpoint/save.py": "paceline-save", "data/reading/prefetch.py": "read-ahead"}


def telling_place(stacks: Sequence[Stack]) -> CodeLine | None:
    """Return the place that tells most of where a process is: the innermost that is no library's.

    Where the main thread only waits for another one of ours, it is that one's.
    """
    by_thread = {stack.thread: stack for stack in stacks}
    main = _innermost(by_thread.get(MAIN))
    for file, thread in _DONE_BY.items():
        if main is not None and main.kind == "paceline" and main.file.endswith(file):
            return _innermost(by_thread.get(thread)) or main
    return main


def _innermost(stack: Stack | None) -> CodeLine | None:
    places = stack.places if stack else ()
    return next(
        (place for place in reversed(places) if place.kind != "library"),
        places[-1] if places else None,
    )
