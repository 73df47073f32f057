"""Which lessons a reader has run and which exercises are solved, kept in one small file of the user."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import make_private, write_whole
from paceline.safe_open import read_json


@dataclass(frozen=True)
class Progress:
    """What a reader has done, by the numbers of the lessons."""

    ran: frozenset[int] = frozenset()
    solved: frozenset[int] = frozenset()


def progress_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's progress.

    >>> progress_file({"HOME": "/home/me"})
    PosixPath('/home/me/.local/share/paceline/course.json')
    """
    data = env.get("XDG_DATA_HOME") or f"{env.get('HOME', '~')}/.local/share"
    return Path(data).expanduser() / "paceline" / "course.json"


def read_progress() -> Progress:
    """Return the progress; nothing if the file is missing, damaged or unreadable."""
    try:
        found = read_json(progress_file(os.environ))
    except (OSError, ValueError):
        return Progress()
    if not isinstance(found, dict):
        return Progress()
    return Progress(_numbers(found.get("ran")), _numbers(found.get("solved")))


def add_progress(*, ran: Iterable[int] = (), solved: Iterable[int] = ()) -> str:
    """Add lessons to the progress; return why it could not be saved, or nothing.

    A file that cannot be understood is set aside, not overwritten.
    """
    file, before = progress_file(os.environ), read_progress()
    facts = {"ran": sorted(before.ran | {*ran}), "solved": sorted(before.solved | {*solved})}
    try:
        make_private(file.parent)
        if before == Progress():
            with contextlib.suppress(FileNotFoundError):
                _set_aside(file)
        write_whole(file, f"{json.dumps(facts)}\n".encode())
    except OSError as error:
        return f"{file}: {error.strerror or error}"
    return ""


def _set_aside(file: Path) -> None:
    file.replace(file.with_suffix(".damaged"))


def _numbers(found: Any) -> frozenset[int]:
    """Return the lesson numbers in a list that may hold anything.

    >>> sorted(_numbers([4, True, "5", 10**9, -1, 0])), _numbers("4")
    ([0, 4], frozenset())
    """
    if not isinstance(found, list):
        return frozenset()
    return frozenset(one for one in found if type(one) is int and 0 <= one < 1000)
