"""How one rank of a local launch begins and how it reports its end: `python -m paceline.launch.child path|module WHAT ...`.

It imports nothing heavy: what the user's script does not import is not paid for.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from paceline import handover
from paceline.errors import PacelineError, Stopped
from paceline.world.orphan import die_with_parent

_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Timeout waiting",
    "Read timeout",
    "Socket closed",
)


def main() -> None:
    """Run the target as the main program; write down why if it fails."""
    die_with_parent()
    if os.environ.get(handover.LAUNCHER, "") != str(os.getppid()):
        os._exit(1)  # it died before the kernel was asked
    faulthandler.enable()
    kind, what, *arguments = sys.argv[1:]
    sys.argv = [what, *arguments]
    try:
        if kind == "path":
            sys.path[0] = str(Path(what).resolve().parent)
            runpy.run_path(what, run_name="__main__")
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except Stopped as stop:
        _leave(int(str(stop.code)))
    except Exception as error:  # noqa: BLE001 - whatever the script raises is passed on
        _report(error)
        _leave(getattr(error, "exit_code", 1))
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End this rank without tearing the interpreter down around native threads: that aborted, rarely."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001 - no public way
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(error: Exception) -> None:
    """Write the failure where the launcher finds it."""
    known = isinstance(error, PacelineError)
    text = f"error: {error}" if known else "".join(traceback.format_exception(error.with_traceback(_own_frames(error))))
    lost_peer = not known and any(sign in str(error) for sign in _PEER_LOST)
    record = {
        "time_s": time.time(),
        "what": type(error).__name__,
        "text": text.rstrip(),
        "known": known,
        "hopeless": isinstance(error, PacelineError) and error.comes_again,
        "lost_peer": lost_peer,
    }
    with contextlib.suppress(OSError):
        Path(os.environ[handover.FAILURE]).write_text(json.dumps(record), encoding="utf-8")


def _own_frames(error: Exception) -> TracebackType | None:
    """Return the traceback from the user's first frame on."""
    trace = error.__traceback__
    while (
        trace is not None
        and trace.tb_next is not None
        and trace.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}
    ):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
