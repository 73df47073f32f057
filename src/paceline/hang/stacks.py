"""Python stacks of the threads of this process, taken without stopping it, and the frame that explains most."""

from __future__ import annotations

import re
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
SAVE_THREAD = "paceline-save"
PREFETCH_THREAD = "read-ahead"


@dataclass(frozen=True)
class CodeLine:
    """A line of code that a thread executes."""

    file: str
    line: int
    function: str
    kind: str
    """Origin of the code: user, paceline or library."""

    def __str__(self) -> str:
        return f"{self.function} at {Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """The call stack of a thread, the innermost frame last."""

    thread: str
    places: tuple[CodeLine, ...]


def own_stacks() -> list[Stack]:
    """Return the stacks of all threads of this process except the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    names[threading.main_thread().ident] = MAIN
    stacks = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - documented, despite its name
        if ident != threading.get_ident():
            stacks.append(Stack(names.get(ident, f"thread {ident}"), _places(frame)))
    return stacks


def _places(frame: FrameType | None) -> tuple[CodeLine, ...]:
    places: list[CodeLine] = []
    while frame is not None and len(places) < _MOST_FRAMES:
        code = frame.f_code
        kind = kind_of(code.co_filename)
        places.append(CodeLine(code.co_filename, frame.f_lineno or 0, code.co_name, kind))
        frame = frame.f_back
    return tuple(reversed(places))


_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<frozen"}
)


# The ranks may have another interpreter.
_OTHER_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/")


def kind_of(file: str) -> str:
    """Return the origin of a source file.

    >>> kind_of("/home/me/train.py"), kind_of(threading.__file__), kind_of(__file__)
    ('user', 'library', 'paceline')
    >>> kind_of("/opt/env/lib/python3.13/site-packages/lightning/trainer.py")
    'library'
    """
    if file.startswith(_OURS) and "/recipes/" not in file:
        return "paceline"
    library = file.startswith(_LIBRARIES) or _OTHER_LIBRARIES.search(file)
    return "library" if library else "user"


# While the main thread waits in one of these files, the named thread does the work.
_WORKERS = {
    "checkpoint/save.py": SAVE_THREAD,
    "checkpoint/commit.py": SAVE_THREAD,
    "data/reading/prefetch.py": PREFETCH_THREAD,
}


def main_place(stacks: Sequence[Stack]) -> CodeLine | None:
    """Return the frame that explains most: the innermost one outside libraries, of the thread that does the work."""
    by_thread = {stack.thread: stack for stack in stacks}
    main = _innermost(by_thread.get(MAIN))
    for file, thread in _WORKERS.items():
        if main is not None and main.kind == "paceline" and main.file.endswith(file):
            return _innermost(by_thread.get(thread)) or main
    return main


def _innermost(stack: Stack | None) -> CodeLine | None:
    places = stack.places if stack else ()
    for place in reversed(places):
        if place.kind != "library":
            return place
    return places[-1] if places else None
