"""`paceline lesson --check` and `--grades`: grade one exercise, all of a student, or show those of a class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.lesson_list import keep_progress, name_next
from paceline.course.catalog import find_lesson, lessons_folder
from paceline.course.exercise import Exercise, exercise_of, exercises
from paceline.course.grade import grade
from paceline.course.gradebook import ExerciseGrade, class_table, grades_json, read_grades
from paceline.course.progress import read_progress
from paceline.errors import ConfigError
from paceline.terminal import say, table


def check_one(exercise: Exercise, *, as_json: bool) -> int:
    """Grade the exercise; return 1 if it is not solved yet."""
    file, lesson = Path(exercise.name), exercise.lesson
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist", fix=f"start with `paceline lesson {lesson.number} --try`"
        )
    result = grade(exercise, file.absolute())
    if result.passed:
        keep_progress(solved=[lesson.number])
    if as_json:
        print(json.dumps({"lesson": lesson.number, "passed": result.passed, "hint": result.hint}))
    elif result.passed:
        known = exercises(lesson.path.parent)
        solved = len(read_progress().solved & {*known})
        print(f"right: lesson {lesson.number} is solved ({solved} of {len(known)} exercises)")
        name_next(lesson)
    else:
        say(f"not yet: {result.hint}")
    return 0 if result.passed else 1


def check_all(*, as_json: bool) -> int:
    """Grade every exercise in this folder; return 1 unless all are solved."""
    found = []
    for number in exercises(lessons_folder()):
        found.append(_grade_of(exercise_of(find_lesson(str(number)))))
        if not as_json:
            one = found[-1]
            say(f"{number:4}  {one.state:7}  {one.hint}".rstrip())
    solved = [one.lesson for one in found if one.state == "solved"]
    if as_json:
        print(json.dumps(grades_json(found), indent=2))
    else:
        print(f"\n{len(solved)} of {len(found)} exercises solved")
    return 0 if len(solved) == len(found) else 1


def _grade_of(exercise: Exercise) -> ExerciseGrade:
    file, number = Path(exercise.name), exercise.lesson.number
    if not file.is_file():
        return ExerciseGrade(number, "missing")
    result = grade(exercise, file.absolute())
    return ExerciseGrade(number, "solved" if result.passed else "open", result.hint)


def show_class(files: Sequence[str], *, as_json: bool) -> int:
    """Print the grades of a class, a row per student."""
    if not files:
        raise ConfigError(
            "--grades needs the files of the students",
            fix="`paceline lesson --check --all --json > ada.json` writes one; then `--grades *.json`",
        )
    grades = read_grades(files)
    if as_json:
        print(json.dumps({name: grades_json(mine) for name, mine in grades.items()}, indent=2))
    else:
        head, rows = class_table(grades)
        table(head, rows, numeric=["solved"])
    return 0
