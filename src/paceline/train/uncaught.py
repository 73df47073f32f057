"""How a script ends that plain `python` or torchrun started, if an error of Paceline is not caught: message, fix, exit code."""

from __future__ import annotations

import sys
from types import TracebackType

from paceline import terminal
from paceline.errors import PacelineError


def show_without_traceback(error: BaseException | None) -> None:
    """Let Python print this error, if nobody catches it, without a traceback, and exit with its code.

    Set after the ranks have joined: torch's own hook would swallow the exit code.
    """
    if not isinstance(error, PacelineError):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        terminal.error(f"error: {error}")
        raise SystemExit(error.exit_code)

    sys.excepthook = hook
