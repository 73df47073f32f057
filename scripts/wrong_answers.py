"""Does every wrong answer get its own hint? `python scripts/wrong_answers.py [--only N ...]` grades them all, with the copies and solutions."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.course.catalog import find_lesson, lessons_folder
from paceline.course.exercise import Exercise, exercise_of, exercises
from paceline.course.grade import LIMIT_S, grade

COPY, SOLUTION = "(the copy)", "(the solution)"
_HANG_LIMIT_S = 75
_ROW = "{:>6}  {:44}  {:70}  {:3}  {:>7}"


@dataclass(frozen=True)
class WrongAnswer:
    """A mistake in an exercise, and the hint that it must get."""

    lesson: int
    mistake: str
    find: str
    """A part of the copy that occurs once."""
    put: str
    """Its replacement."""
    words: str
    """A pattern of the hint that matches no other hint of this lesson."""
    hangs: bool = False
    """Whether the run must be stopped."""


def wrong_answers() -> list[WrongAnswer]:
    """Return all mistakes of `lessons/wrong_answers.toml`."""
    text = (lessons_folder() / "wrong_answers.toml").read_text(encoding="utf-8")
    return [WrongAnswer(**table) for table in tomllib.loads(text)["wrong"]]


def is_right(name: str, hint: str, words: Mapping[str, str]) -> bool:
    """Return whether a copy got the right hint, given the words of all mistakes of its lesson.

    >>> words = {"sum": "twice the mean", "rank 0": "of one rank"}
    >>> is_right("sum", "it is twice the mean", words), is_right("rank 0", "it is twice the mean", words)
    (True, False)
    >>> is_right(SOLUTION, "", words), is_right(COPY, "", words), is_right(COPY, "own gradient", words)
    (True, False, True)
    """
    matching = [mistake for mistake, pattern in words.items() if re.search(pattern, hint)]
    if name == SOLUTION:
        return hint == ""
    return matching == [name] if name in words else hint != "" and not matching


def sources(exercise: Exercise, answers: list[WrongAnswer]) -> Iterator[tuple[str, str, int]]:
    """Yield the copy, the solution and each wrong answer, with their time limits."""
    yield COPY, exercise.source, LIMIT_S
    yield SOLUTION, exercise.solution, LIMIT_S
    for answer in answers:
        source = exercise.source.replace(answer.find, answer.put)
        yield answer.mistake, source, _HANG_LIMIT_S if answer.hangs else LIMIT_S


def grade_lesson(number: int) -> Iterator[bool]:
    """Grade all copies of a lesson, print a row for each, and yield whether it got the right hint."""
    exercise = exercise_of(find_lesson(str(number)))
    answers = [one for one in wrong_answers() if one.lesson == number]
    words = {one.mistake: one.words for one in answers}
    for name, source, limit_s in sources(exercise, answers):
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / exercise.name
            file.write_text(source, encoding="utf-8")
            hint = grade(exercise, file, limit_s).hint
        seconds = time.perf_counter() - begun
        right = is_right(name, hint, words)
        shown = hint[:70] if right else hint
        ending = "yes" if right else "NO"
        print(_ROW.format(number, name, shown, ending, f"{seconds:.1f} s"), flush=True)
        yield right


def main() -> int:
    """Grade the lessons that are asked for, or all; exit with 1 if one gets another hint than its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="grade these lessons only")
    numbers = parser.parse_args().only or exercises(lessons_folder())
    print(_ROW.format("lesson", "mistake", "hint", "ok", "seconds"))
    results = [right for number in numbers for right in grade_lesson(number)]
    print(f"{len(results)} graded, {results.count(False)} without the right hint")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
