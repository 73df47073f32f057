"""The grades of one student, and a table of the grades of a class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.safe_open import read_json

State = Literal["solved", "open", "missing"]
_SHOWN = {"solved": "yes", "open": "no", "missing": "-"}


@dataclass(frozen=True)
class ExerciseGrade:
    """The grade of one exercise."""

    lesson: int
    state: State
    """Solved, open (there is a file, but it is not right yet), or missing (there is no file)."""
    hint: str = ""


def grades_json(grades: Sequence[ExerciseGrade]) -> dict[str, Any]:
    """Return the grades of a student as they are written to a file.

    >>> found = grades_json([ExerciseGrade(0, "solved"), ExerciseGrade(1, "missing")])
    >>> found["solved"], found["exercises"][1]
    (1, {'lesson': 1, 'state': 'missing', 'hint': ''})
    """
    solved = sum(one.state == "solved" for one in grades)
    return {"solved": solved, "exercises": [asdict(one) for one in grades]}


def read_grades(files: Iterable[str]) -> dict[str, list[ExerciseGrade]]:
    """Return the grades of a class by student; a student is named like the file."""
    found: dict[str, list[ExerciseGrade]] = {}
    for name in files:
        student = Path(name).stem
        if student in found:
            raise ConfigError(
                f"two files are named {student!r}, so two students would have one row",
                fix="give each file the name of its student, such as ada.json",
            )
        found[student] = _read(Path(name))
    return found


def _read(file: Path) -> list[ExerciseGrade]:
    try:
        tables = read_json(file, links=True)["exercises"]
        return [_parse(table) for table in tables]
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = error.strerror if isinstance(error, OSError) else ""
        raise ConfigError(
            f"{file} holds no grades{f': {problem}' if problem else ''}",
            fix=f"make it with `paceline lesson --check --all --json > {file.name}`",
        ) from None


def _parse(table: Mapping[str, Any]) -> ExerciseGrade:
    lesson, state, hint = table["lesson"], table["state"], table.get("hint", "")
    if type(lesson) is not int or state not in _SHOWN or not isinstance(hint, str):
        raise ValueError(f"not a grade: {table}")
    return ExerciseGrade(lesson, state, hint)


def class_table(
    grades: Mapping[str, Sequence[ExerciseGrade]],
) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: a row per student, a column per exercise.

    >>> class_table({"ada": [ExerciseGrade(0, "solved"), ExerciseGrade(4, "open")], "bob": []})
    (['student', 'solved', '0', '4'], [['ada', '1', 'yes', 'no'], ['bob', '0', '-', '-']])
    """
    lessons = sorted({one.lesson for mine in grades.values() for one in mine})
    rows = []
    for student, mine in grades.items():
        states = {one.lesson: one.state for one in mine}
        solved = sum(state == "solved" for state in states.values())
        cells = [_SHOWN[states.get(lesson, "missing")] for lesson in lessons]
        rows.append([student, str(solved), *cells])
    return ["student", "solved", *map(str, lessons)], rows
