"""`paceline lesson`: list the lessons, show and run one, or do its exercise."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.lesson_grades import check_all, check_one, show_class
from paceline.cli.lesson_list import keep_progress, list_lessons, name_next
from paceline.config.arguments import flag, positional
from paceline.course.catalog import Lesson, find_lesson
from paceline.course.difference import diff_sources
from paceline.course.exercise import exercise_of
from paceline.course.output import LessonOutput
from paceline.course.run_lesson import LessonCommand, command_of, run_command
from paceline.course.show import show_code, show_difference, show_lesson
from paceline.errors import ConfigError
from paceline.rundir import write_whole
from paceline.terminal import say

_TAIL = 200
"""The most lines of a command that failed that are shown again in full."""


@dataclass(frozen=True, kw_only=True)
class LessonArguments:
    """Without a number it lists the lessons; with one it explains the lesson and runs it in this folder."""

    number: tuple[str, ...] = positional((), metavar="N")
    """Number of the lesson; for --grades, the files of the students."""
    show: bool = False
    """Show the whole code of the lesson without running it."""
    attempt: bool = flag("--try")
    """Write its exercise into this folder."""
    check: bool = False
    """Run and grade the exercise in this folder."""
    solution: bool = False
    """Show the solution of its exercise."""
    all: bool = False
    """With --check: grade all exercises in this folder."""
    grades: bool = False
    """Show the grades of a class: a table of the files that --check --all --json wrote, one per student."""
    json: bool = False
    """Print the list, or the grades of --check and --grades, as JSON."""


def main(arguments: LessonArguments) -> int:
    """List, show and run, or grade; return the exit code of the first command that failed."""
    mode = _mode(arguments)
    if mode == "--grades":
        return show_class(arguments.number, as_json=arguments.json)
    if mode == "--check" and arguments.all and not arguments.number:
        return check_all(as_json=arguments.json)
    _refuse_others(arguments, mode)
    if not arguments.number:
        list_lessons(as_json=arguments.json)
        return 0
    lesson = find_lesson(arguments.number[0])
    if mode == "--check":
        return check_one(exercise_of(lesson), as_json=arguments.json)
    return _ACTIONS[mode](lesson)


def _mode(arguments: LessonArguments) -> str:
    modes = {
        "--show": arguments.show,
        "--try": arguments.attempt,
        "--check": arguments.check,
        "--solution": arguments.solution,
        "--grades": arguments.grades,
    }
    given = [mode for mode, is_given in modes.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", fix="give one of them")
    return given[0] if given else ""


def _refuse_others(arguments: LessonArguments, mode: str) -> None:
    """Raise for options and numbers that do not go together."""
    if arguments.all:
        raise ConfigError(
            "--all grades every exercise in this folder",
            fix="type `paceline lesson --check --all`, without a number",
        )
    if len(arguments.number) > 1:
        raise ConfigError(
            f"one lesson at a time, got {' '.join(arguments.number)}", fix="give one number"
        )
    if mode and not arguments.number:
        raise ConfigError(
            f"{mode} needs the number of a lesson",
            fix="`paceline lesson` lists them, and marks lessons with an exercise",
        )
    if arguments.json and arguments.number and mode != "--check":
        raise ConfigError(
            "--json applies to the list of lessons, to --check and to --grades",
            fix="add --check, or remove the number",
        )


def _show(lesson: Lesson) -> int:
    show_code(lesson)
    return 0


def _try(lesson: Lesson) -> int:
    """Write the exercise, unless the file exists: it may be the reader's work."""
    exercise = exercise_of(lesson)
    file, number = Path(exercise.name), lesson.number
    try:
        file.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        print(f"{file} exists and was not changed. To start over, remove it and run --try again.\n")
    else:
        write_whole(file, exercise.source.encode())
    say(f"Lesson {number}: {lesson.title}\n\n{exercise.task}\n")
    print(f"Edit {file}, then: paceline lesson {number} --check")
    return 0


def _solution(lesson: Lesson) -> int:
    """Print what the solution changes in the copy of the exercise."""
    exercise = exercise_of(lesson)
    say(f"Lesson {lesson.number}: {lesson.title}\n\n{exercise.task}\n")
    print(f"One solution, as changes to {exercise.name}:\n")
    show_difference(diff_sources(exercise.source, exercise.solution))
    return 0


def _wants_to_run() -> bool:
    """Ask on a terminal; elsewhere nobody could answer."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    try:
        input("\nPress Enter to run it, Ctrl-C to leave. ")
    except (EOFError, KeyboardInterrupt):
        print()
        return False
    return True


def _explain_and_run(lesson: Lesson) -> int:
    show_lesson(lesson)
    return _run(lesson) if _wants_to_run() else 0


def _run(lesson: Lesson) -> int:
    """Run the commands of a lesson in order; skip those that need something this machine lacks."""
    skipped = False
    for line, remark in lesson.remarks.items():
        command = command_of(line, lesson)
        print(f"\n$ {line}" + (f"    # {remark}" if remark else ""), flush=True)
        if command.missing:
            print(f"(skipped: needs {command.missing})", flush=True)
            skipped = True
        elif code := _run_one(lesson, line, command):
            print(f"stopped: exit code {code}", file=sys.stderr)
            return code
    if not skipped:
        keep_progress(ran=[lesson.number])
    name_next(lesson)
    return 0


def _run_one(lesson: Lesson, line: str, command: LessonCommand) -> int:
    """Run a command and show its output, cut to what matters, or its whole end if it failed unexpectedly."""
    output, whole = LessonOutput(lesson.path.name), deque[str](maxlen=_TAIL)

    def show(text: str) -> None:
        whole.append(text)
        for part in output.feed(text):
            print(part, flush=True)

    code = run_command(command, Path.cwd(), show)
    if line not in lesson.failing:
        if code:
            print("\nThe end of the whole output:", *whole, sep="\n", flush=True)
        return code
    print("it failed, as expected" if code else "it should have failed, and did not", flush=True)
    return 0 if code else 1


_ACTIONS = {"": _explain_and_run, "--show": _show, "--try": _try, "--solution": _solution}
