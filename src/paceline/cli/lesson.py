"""The course: list the lessons, show and run one, or try an exercise."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paceline.course.catalog import Lesson, all_lessons, find_lesson
from paceline.course.exercise import Exercise, exercise_of, exercises
from paceline.course.grade import grade
from paceline.course.run_lesson import command_of, run_command
from paceline.errors import ConfigError
from paceline.rundir import write_whole

HELP = "the course: every lesson of distributed training, on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "number", nargs="?", default="", metavar="N", help="which lesson (default: list them)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="show it, and do not run it")
    what.add_argument(
        "--try", dest="attempt", action="store_true", help="write its exercise into this folder"
    )
    what.add_argument(
        "--check", action="store_true", help="run and grade the exercise in this folder"
    )
    parser.add_argument("--json", action="store_true", help="the list, or the grade, as JSON")


def main(known: argparse.Namespace) -> int:
    """List, or show and run; exit with the code of the first command that failed."""
    if known.arguments:
        raise ConfigError(
            f"unexpected word {known.arguments[0]!r}", fix="see `paceline lesson --help`"
        )
    if not known.number:
        if known.attempt or known.check or known.show:
            raise ConfigError(
                "which lesson?",
                fix="give its number; `paceline lesson` marks those with an exercise",
            )
        _list(as_json=known.json)
        return 0
    lesson = find_lesson(known.number)
    if known.json and not known.check:
        raise ConfigError(
            "what of a lesson is to be JSON?",
            fix="give --check, or --json without a number for the list",
        )
    if known.attempt:
        return _try(exercise_of(lesson))
    if known.check:
        return _check(exercise_of(lesson), as_json=known.json)
    print(lesson.source)
    return 0 if known.show else _run(lesson)


def _list(*, as_json: bool) -> None:
    lessons = all_lessons()
    tried = exercises(lessons[0].path.parent)
    if as_json:
        facts = [
            {
                "number": one.number,
                "title": one.title,
                "file": str(one.path),
                "seconds": one.seconds,
                "exercise": one.number in tried,
            }
            for one in lessons
        ]
        print(json.dumps({"lessons": facts}, indent=2))
        return
    for one in lessons:
        print(
            f"{one.number:3}  {one.seconds:3} s  {one.title}{'  *' if one.number in tried else ''}"
        )
    print(
        "\n`paceline lesson 4` shows and runs one, in this folder; `--show` only shows it. Times are of 2 cores."
    )
    print(
        "* has an exercise: `paceline lesson 4 --try` writes it into this folder, `--check` grades what you made of it"
    )


def _try(exercise: Exercise) -> int:
    """Write the copy with its hole, unless there is such a file already: it may be the reader's work."""
    file, number = Path(exercise.name), exercise.lesson.number
    try:
        file.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        print(
            f"{file} is here already, and stays as it is. To start over, remove it and say --try again.\n"
        )
    else:
        write_whole(file, exercise.source.encode())
    print(f"Lesson {number}: {exercise.lesson.title}\n\n{exercise.task}\n")
    print(f"Edit {file}, then: paceline lesson {number} --check")
    return 0


def _check(exercise: Exercise, *, as_json: bool) -> int:
    """Grade the copy; exit with 1 if it is not right yet."""
    file, number = Path(exercise.name), exercise.lesson.number
    if not file.is_file():
        raise ConfigError(
            f"there is no {file} here", fix=f"begin with `paceline lesson {number} --try`"
        )
    found = grade(exercise, file.absolute())
    if as_json:
        print(json.dumps({"lesson": number, "passed": found.passed, "hint": found.hint}))
    else:
        print(f"right: lesson {number} is solved" if found.passed else f"not yet: {found.hint}")
    return 0 if found.passed else 1


def _run(lesson: Lesson) -> int:
    """Run the commands of a lesson one after the other; those that need what is not here are named and passed over."""
    for line in lesson.commands:
        command = command_of(line, lesson)
        print(f"\n$ {line}", flush=True)
        if command.missing:
            print(f"(needs {command.missing}, which is not here)", flush=True)
            continue
        code = run_command(command, Path.cwd())
        if line in lesson.failing:
            code = 0 if code else 1
            print(
                "it was meant to fail" if code == 0 else "it was meant to fail, and did not",
                flush=True,
            )
        if code:
            print(f"it ended with exit code {code}", file=sys.stderr)
            return code
    return 0
