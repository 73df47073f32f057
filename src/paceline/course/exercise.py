"""What is left for the reader to do? A copy of a lesson with one part missing or wrong, and what its run must show."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.course.catalog import Lesson
from paceline.errors import ConfigError

_FILE = "exercises.toml"
_NUMBER = r"(?P<value>nan|inf|\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)"  # no more: two ranks may print into one line
_RULES = ("be", "same", "differ", "below", "above")


@dataclass(frozen=True)
class Check:
    """One thing that the output of a run must show."""

    see: str
    """What to look for: a pattern with a group `value` (NUMBER is one), and maybe one `key`: values of one key are compared."""
    rule: str
    """What must hold of the values: one of be, same, differ, below, above."""
    bound: Any
    """What the rule compares with: all values of be; how far apart those of same may be; the limit."""
    hint: str
    """What to say if it does not hold; SEEN stands for the values."""


@dataclass(frozen=True)
class Exercise:
    """One exercise."""

    lesson: Lesson
    task: str
    find: str
    """The part that is taken out."""
    put: str
    """What stands there instead."""
    runs: tuple[tuple[str, ...], ...]
    """How the copy, FILE, is run: lines of one list share a folder."""
    checks: tuple[Check, ...]
    """What the output of all runs must show; the first that does not hold has the hint."""
    frame: tuple[tuple[str, str], ...] = ()
    """What else differs from the lesson, solved or not: fewer steps, a line that prints more."""
    errors: tuple[tuple[str, str], ...] = ()
    """What to say of errors that are known."""
    stuck: str = ""
    """What to say if a run does not end."""

    @cached_property
    def solution(self) -> str:
        """The copy without its hole."""
        source = self.lesson.source
        for find, put in self.frame:
            source = source.replace(find, put, 1)
        return source

    @property
    def source(self) -> str:
        """The copy with its hole."""
        return self.solution.replace(self.find, self.put, 1)

    @property
    def name(self) -> str:
        """Of the copy."""
        return f"lesson_{self.lesson.number:02d}.py"


def exercise_of(lesson: Lesson) -> Exercise:
    """Return the exercise of a lesson; an error where there is none."""
    known = _read(lesson.path.with_name(_FILE))
    if (found := known.get(str(lesson.number))) is None:
        numbers = ", ".join(sorted(known, key=int))
        raise ConfigError(f"lesson {lesson.number} has no exercise", fix=f"try one of {numbers}")
    return Exercise(
        lesson,
        re.sub(r"\s+", " ", found["task"]),
        found["find"],
        found["put"],
        tuple(tuple(lines) for lines in found["runs"]),
        tuple(map(_check_of, found["checks"])),
        tuple((find, put) for find, put in found.get("frame", ())),
        tuple((seen, hint) for seen, hint in found.get("errors", ())),
        found.get("stuck", ""),
    )


def exercises(folder: Path) -> list[int]:
    """Return the lessons that have one."""
    return sorted(map(int, _read(folder / _FILE)))


def _check_of(found: Mapping[str, Any]) -> Check:
    [rule] = [name for name in _RULES if name in found]
    return Check(found["see"].replace("NUMBER", _NUMBER), rule, found[rule], found["hint"])


def _read(path: Path) -> Mapping[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
