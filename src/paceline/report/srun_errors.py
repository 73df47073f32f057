"""How the first task of a Slurm step ended, in srun's words: of a rank that was killed nobody else knows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.rundir import RunDir

_LINE = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (.+)$", re.MULTILINE)
_SAID_ITSELF = "Exited with exit code"  # its record has the exception
_IN_WORDS = {
    "Killed": "was killed by SIGKILL",
    "Out Of Memory": "was killed: the memory that the job asked for was used up",
}


@dataclass(frozen=True)
class TaskEnd:
    """A task that ended badly, and said nothing of it."""

    node: str
    task: int
    """Its number, which is the rank unless agents were started."""
    how: str


def first_end(folder: RunDir, since_s: float) -> TaskEnd | None:
    """Return how the first task ended, of the job that said so last; nothing where none was killed since then."""
    files = sorted(
        (file for file in folder.jobs.glob("*.errors") if _time(file) >= since_s), key=_time
    )
    return end_in(files[-1].read_text(errors="replace")) if files else None


def end_in(text: str) -> TaskEnd | None:
    r"""Return the first end that a rank could not tell of itself.

    >>> end_in("srun: error: n1: task 0: Exited with exit code 76\nsrun: error: n2: task 3: Out Of Memory")
    TaskEnd(node='n2', task=3, how='was killed: the memory that the job asked for was used up')
    """
    ends = [
        found.groups() for found in _LINE.finditer(text) if not found[3].startswith(_SAID_ITSELF)
    ]
    if not ends:
        return None
    node, task, words = ends[0]
    return TaskEnd(node, int(task), _IN_WORDS.get(words, f"was ended by a signal ({words})"))


def _time(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0
