"""Exercises: a copy of a lesson with one missing or wrong part, and what its output must show."""

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
_NUMBER = r"(?P<value>nan|inf|\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)"  # no trailing characters: two ranks may print into one line
_RULES = ("be", "same", "differ", "below", "above", "never")


@dataclass(frozen=True)
class Check:
    """One condition on the output of a run."""

    see: str
    """A pattern with a group `value` (NUMBER is one) and optionally `key`: values of one key are compared."""
    rule: str
    """The condition on the values: be, same, differ, below, above or never."""
    bound: Any
    """The expected values of `be`, the tolerance of `same`, the limit, or the pattern of `never`."""
    hint: str
    """The text for a failed check; SEEN stands for the values."""
    missing: str = ""
    """The text for an output in which `see` is not found."""


@dataclass(frozen=True)
class Exercise:
    """One exercise."""

    lesson: Lesson
    task: str
    find: str
    """The part that is removed."""
    put: str
    """Its replacement."""
    runs: tuple[tuple[str, ...], ...]
    """Commands that run the copy, FILE; those of one list share a folder."""
    checks: tuple[Check, ...]
    """Conditions on the output of all runs; the first failed one gives the hint."""
    frame: tuple[tuple[str, str], ...] = ()
    """Other differences from the lesson, such as fewer steps or more output."""
    errors: tuple[tuple[str, str], ...] = ()
    """Hints for known error messages."""
    stuck: str = ""
    """The hint for a run that hangs."""

    @cached_property
    def solution(self) -> str:
        """The solved copy."""
        source = self.lesson.source
        for find, put in self.frame:
            source = source.replace(find, put, 1)
        return source

    @property
    def source(self) -> str:
        """The copy that the reader starts with."""
        return self.solution.replace(self.find, self.put, 1)

    @property
    def name(self) -> str:
        """The file name of the copy."""
        return f"lesson_{self.lesson.number:02d}.py"


def exercise_of(lesson: Lesson) -> Exercise:
    """Return the exercise of a lesson, or raise if it has none."""
    tables = _read(lesson.path.with_name(_FILE))
    table = tables.get(str(lesson.number))
    if table is None:
        numbers = ", ".join(sorted(tables, key=int))
        raise ConfigError(f"lesson {lesson.number} has no exercise", fix=f"try one of {numbers}")
    return Exercise(
        lesson,
        re.sub(r"\s+", " ", table["task"]),
        table["find"],
        table["put"],
        tuple(map(tuple, table["runs"])),
        tuple(map(_check_of, table["checks"])),
        tuple(map(tuple, table.get("frame", ()))),
        tuple(map(tuple, table.get("errors", ()))),
        table.get("stuck", ""),
    )


def exercises(folder: Path) -> list[int]:
    """Return the numbers of the lessons that have an exercise."""
    return sorted(map(int, _read(folder / _FILE)))


def _check_of(table: Mapping[str, Any]) -> Check:
    [rule] = [name for name in _RULES if name in table]
    see = table["see"].replace("NUMBER", _NUMBER)
    return Check(see, rule, table[rule], table["hint"], table.get("missing", ""))


def _read(path: Path) -> Mapping[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
