"""The traceback of a script as its author needs it: without the frames of Paceline and torch between the script's own."""

from __future__ import annotations

import traceback
from pathlib import Path

_OWN = f"{Path(__file__).parent.parent}/"
_CALLS_FORWARD = "torch/nn/modules/module.py"


def traceback_text(error: BaseException) -> str:
    """Return the traceback; of the library's frames only the innermost one stays."""
    found = traceback.TracebackException.from_exception(error)
    _fold(found)
    return "".join(found.format()).rstrip()


def _fold(found: traceback.TracebackException | None) -> None:
    if found is None:
        return
    *outer, innermost = found.stack or [None]
    frames = [frame for frame in outer if frame is not None and not _is_library(frame.filename)]
    if innermost is not None:
        found.stack = traceback.StackSummary.from_list([*frames, innermost])
    _fold(found.__cause__)
    _fold(found.__context__)


def _is_library(file: str) -> bool:
    return file.startswith(_OWN) or file.endswith(_CALLS_FORWARD)
