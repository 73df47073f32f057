"""`paceline lesson`: list the lessons, show and run one, or do its exercise."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.arguments import flag, positional
from paceline.course.catalog import Lesson, all_lessons, find_lesson
from paceline.course.exercise import Exercise, exercise_of, exercises
from paceline.course.grade import grade
from paceline.course.run_lesson import command_of, run_command
from paceline.errors import ConfigError
from paceline.rundir import write_whole


@dataclass(frozen=True, kw_only=True)
class LessonArguments:
    """Without a number it lists the lessons; with one it shows the lesson and runs it in this folder."""

    number: str = positional("", metavar="N")
    """Number of the lesson."""
    show: bool = False
    """Show the lesson without running it."""
    attempt: bool = flag("--try")
    """Write its exercise into this folder."""
    check: bool = False
    """Run and grade the exercise in this folder."""
    json: bool = False
    """Print the list, or the grade of --check, as JSON."""


def main(arguments: LessonArguments) -> int:
    """List, show and run, or grade; return the exit code of the first command that failed."""
    modes = {"--show": arguments.show, "--try": arguments.attempt, "--check": arguments.check}
    given = [mode for mode, is_given in modes.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", fix="give one of them")
    if not arguments.number and given:
        raise ConfigError(
            f"{given[0]} needs the number of a lesson",
            fix="`paceline lesson` lists them, and marks lessons with an exercise",
        )
    if not arguments.number:
        _list(as_json=arguments.json)
        return 0
    lesson = find_lesson(arguments.number)
    if arguments.json and not arguments.check:
        raise ConfigError(
            "--json applies to the list of lessons and to --check",
            fix="add --check, or remove the number",
        )
    if arguments.attempt:
        return _try(exercise_of(lesson))
    if arguments.check:
        return _check(exercise_of(lesson), as_json=arguments.json)
    print(lesson.source)
    return 0 if arguments.show else _run(lesson)


def _list(*, as_json: bool) -> None:
    lessons = all_lessons()
    with_exercise = exercises(lessons[0].path.parent)
    if as_json:
        facts = [_facts(lesson, has_exercise=lesson.number in with_exercise) for lesson in lessons]
        print(json.dumps({"lessons": facts}, indent=2))
        return
    for lesson in lessons:
        mark = "  *" if lesson.number in with_exercise else ""
        print(f"{lesson.number:3}  {lesson.seconds:3} s  {lesson.title}{mark}")
    print(
        "\n`paceline lesson 4` shows lesson 4 and runs it in this folder; `--show` only shows it. "
        "Times measured on 2 cores."
    )
    print(
        "* has an exercise: `paceline lesson 4 --try` writes it into this folder, "
        "`--check` grades your solution"
    )


def _facts(lesson: Lesson, *, has_exercise: bool) -> dict[str, Any]:
    return {
        "number": lesson.number,
        "title": lesson.title,
        "file": str(lesson.path),
        "seconds": lesson.seconds,
        "exercise": has_exercise,
    }


def _try(exercise: Exercise) -> int:
    """Write the exercise, unless the file exists: it may be the reader's work."""
    file, number = Path(exercise.name), exercise.lesson.number
    try:
        file.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        print(f"{file} exists and was not changed. To start over, remove it and run --try again.\n")
    else:
        write_whole(file, exercise.source.encode())
    print(f"Lesson {number}: {exercise.lesson.title}\n\n{exercise.task}\n")
    print(f"Edit {file}, then: paceline lesson {number} --check")
    return 0


def _check(exercise: Exercise, *, as_json: bool) -> int:
    """Grade the exercise; return 1 if it is not solved yet."""
    file, number = Path(exercise.name), exercise.lesson.number
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist", fix=f"start with `paceline lesson {number} --try`"
        )
    result = grade(exercise, file.absolute())
    if as_json:
        print(json.dumps({"lesson": number, "passed": result.passed, "hint": result.hint}))
    else:
        print(f"right: lesson {number} is solved" if result.passed else f"not yet: {result.hint}")
    return 0 if result.passed else 1


def _run(lesson: Lesson) -> int:
    """Run the commands of a lesson in order; skip those that need something this machine lacks."""
    for line in lesson.commands:
        command = command_of(line, lesson)
        print(f"\n$ {line}", flush=True)
        if command.missing:
            print(f"(skipped: needs {command.missing})", flush=True)
            continue
        code = run_command(command, Path.cwd())
        if line in lesson.failing:
            code = 0 if code else 1
            failed = "it failed, as expected" if code == 0 else "it should have failed, and did not"
            print(failed, flush=True)
        if code:
            print(f"stopped: exit code {code}", file=sys.stderr)
            return code
    return 0
