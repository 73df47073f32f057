"""Job logs: their last lines, and how srun says that the first task ended."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.rundir import RunDir
from paceline.safe_open import reading
from paceline.terminal import plain

_TAIL_BYTES = 1 << 16
_SRUN_ERROR = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (.+)$", re.MULTILINE)
_EXITED = "Exited with exit code"  # the rank itself has reported its exception
_REASONS = {
    "Killed": "was killed (SIGKILL)",
    "Out Of Memory": "was killed: it used more memory than the job requested",
}


def tail(path: Path, count: int) -> list[str]:
    """Return the last lines of a log as plain text; an unreadable log has none.

    Of a line with carriage returns (a progress bar), the last part is returned.
    """
    try:
        with reading(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return []
    lines = data.decode(errors="replace").split("\n")
    if size > _TAIL_BYTES:
        lines = lines[1:] or lines  # the first line is incomplete
    if lines and not lines[-1]:
        lines.pop()
    if count <= 0:
        return []
    return [plain(line.rstrip("\r").rpartition("\r")[2]) for line in lines[-count:]]


@dataclass(frozen=True)
class TaskEnd:
    """A task that was killed and could not report it."""

    node: str
    task: int
    """Its number: the rank, unless srun started agents."""
    how: str


def first_end(folder: RunDir, since_s: float) -> TaskEnd | None:
    """Return the first killed task in the newest srun log written since a moment, if any."""
    logs = [file for file in folder.jobs.glob("*.errors") if _modified_s(file) >= since_s]
    if not logs:
        return None
    newest = max(logs, key=_modified_s)
    return end_in("\n".join(tail(newest, _TAIL_BYTES)))


def end_in(text: str) -> TaskEnd | None:
    r"""Return the first task in srun's messages that a signal ended.

    >>> end_in("srun: error: n1: task 0: Exited with exit code 76\nsrun: error: n2: task 3: Killed")
    TaskEnd(node='n2', task=3, how='was killed (SIGKILL)')
    """
    for match in _SRUN_ERROR.finditer(text):
        node, task, reason = match.groups()
        if not reason.startswith(_EXITED):
            how = _REASONS.get(reason, f"was ended by a signal ({reason})")
            return TaskEnd(node, int(task), how)
    return None


def _modified_s(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0
