"""The list of lessons by track, with the reader's progress, and which lesson is next."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from paceline.course.catalog import Lesson
from paceline.course.exercise import exercises
from paceline.course.progress import Progress, add_progress, read_progress
from paceline.course.tracks import Track, lesson_after, tracks
from paceline.terminal import say


def list_lessons(*, as_json: bool) -> None:
    """Print all lessons in the order of the tracks, and what is done."""
    found, progress = tracks(), read_progress()
    with_exercise = set(exercises(found[0].lessons[0].path.parent))
    if as_json:
        facts = [
            _facts(track, lesson, with_exercise, progress)
            for track in found
            for lesson in track.lessons
        ]
        print(json.dumps({"lessons": facts}, indent=2))
        return
    for track in found:
        say(f"{track.name}: {track.about}")
        for lesson in track.lessons:
            print(_row(lesson, with_exercise, progress))
        print()
    _summary(found, with_exercise, progress)


def _row(lesson: Lesson, with_exercise: set[int], progress: Progress) -> str:
    number = lesson.number
    ran = "ran" if number in progress.ran else ""
    exercise = "exercise" if number in with_exercise else ""
    exercise += " solved" if exercise and number in progress.solved else ""
    return f"{number:4}  {lesson.title:34}  {lesson.seconds:3} s  {ran:3}  {exercise}".rstrip()


def _summary(found: Iterable[Track], with_exercise: set[int], progress: Progress) -> None:
    order = [lesson.number for track in found for lesson in track.lessons]
    done = progress.ran | progress.solved
    left = [number for number in order if number not in done]
    ran, solved = len(progress.ran & {*order}), len(progress.solved & with_exercise)
    print(f"{ran} of {len(order)} lessons ran, {solved} of {len(with_exercise)} exercises solved.")
    if left:
        print(f"Next: paceline lesson {left[0]}")
    say(
        "`paceline lesson 4` explains lesson 4 and runs it in this folder; `--show` shows its code. "
        "`--try` writes its exercise into this folder, `--check` grades it. Times measured on 2 cores."
    )


def _facts(
    track: Track, lesson: Lesson, with_exercise: set[int], progress: Progress
) -> dict[str, Any]:
    return {
        "number": lesson.number,
        "title": lesson.title,
        "track": track.name,
        "file": str(lesson.path),
        "seconds": lesson.seconds,
        "exercise": lesson.number in with_exercise,
        "ran": lesson.number in progress.ran,
        "solved": lesson.number in progress.solved,
    }


def keep_progress(*, ran: Iterable[int] = (), solved: Iterable[int] = ()) -> None:
    """Save what was done; say so if that is impossible."""
    if problem := add_progress(ran=ran, solved=solved):
        say(f"Your progress was not saved ({problem}).", sys.stderr)


def name_next(lesson: Lesson) -> None:
    """Print what to do after a lesson: its exercise, if that is open, and the next lesson."""
    progress = read_progress()
    number = lesson.number
    if number in exercises(lesson.path.parent) and number not in progress.solved:
        print(f"\nIts exercise: paceline lesson {number} --try")
    else:
        print()
    following = lesson_after(number, progress.ran | progress.solved)
    if following:
        print(f"Next: paceline lesson {following.number} ({following.title})")
