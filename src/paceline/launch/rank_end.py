"""The end of a rank: everything that an interpreter does at its exit, except its teardown.

With the threads of gloo still running, Python's teardown aborted (SIGABRT) in about 1 of 600 ranks that had raised an
exception, which changed their exit code (docs/notes.md). So a rank ends by `os._exit`, and what that skips is done by hand: threads
are joined, exit handlers run, open files are written. Only the garbage collector knows all open files, and there is no public
call for the other two. `os._exit` in an exit handler that is registered first would be one, but it would skip those that came
before it, such as that of coverage.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from paceline.launch.signals import STOP_SIGNALS

_held: list[object] = []
"""What must not be freed before the process ends."""


def hold_until_exit(objects: list[object]) -> None:
    """Keep what must not be freed before the process ends: files, and the reducer of each DistributedDataParallel.

    Garbage collection loses the text of a file in a cycle (gh-62052). The destructor of a reducer waits for a thread of
    gloo and holds the GIL, for which that thread may wait: a deadlock at exit.
    """
    _held.extend(_writers(objects))
    wrapper = sys.modules.get("torch.nn.parallel.distributed")
    if wrapper is not None:
        ddp = wrapper.DistributedDataParallel
        models = [thing for thing in objects if ddp in type(thing).__mro__]
        _held.extend(vars(model).get("reducer") for model in models)


def _writers(objects: list[Any]) -> list[io.IOBase]:
    """Return the files that may hold unwritten data."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    return [thing for thing in objects if issubclass(type(thing), kinds)]


def _flush_files() -> None:
    """Write what open files still hold, as the end of an interpreter does."""
    for file in _writers(gc.get_objects()):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has gone
            file.flush()


def leave(code: int) -> NoReturn:
    """Join the threads, run the exit handlers, write the open files, and exit without a teardown."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # an interrupt during the exit would only make noise
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing's children do
    atexit._run_exitfuncs()  # noqa: SLF001 - no public way
    sys.stdout.flush()  # the script may have put another object there
    sys.stderr.flush()
    _flush_files()
    os._exit(code)
