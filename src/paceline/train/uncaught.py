"""How a script ends that plain `python` or torchrun started, if an error is not caught: message, fix, exit code; a short traceback."""

from __future__ import annotations

import sys
from types import TracebackType

from paceline import terminal
from paceline.errors import PacelineError
from paceline.launch.traceback_text import traceback_text


def show_briefly(error: BaseException | None) -> None:
    """Let Python print this error, if nobody catches it, as `paceline run` would.

    An error of Paceline has no traceback, and its own exit code; that of another has none of our frames. Set after the
    ranks have joined: torch's own hook would swallow the exit code.
    """
    if not isinstance(error, Exception):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        if isinstance(error, PacelineError):
            terminal.error(f"error: {error}")
            raise SystemExit(error.exit_code)
        print(traceback_text(error), file=sys.stderr)

    sys.excepthook = hook
