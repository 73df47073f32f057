"""The order of the course: tracks, and which lesson comes next."""

from __future__ import annotations

import tomllib
from collections.abc import Container
from dataclasses import dataclass

from paceline.course.catalog import Lesson, all_lessons

_FILE = "tracks.toml"


@dataclass(frozen=True)
class Track:
    """Lessons that belong together, in the order in which to take them."""

    name: str
    about: str
    lessons: tuple[Lesson, ...]


def tracks() -> list[Track]:
    """Return all tracks in order."""
    known = {lesson.number: lesson for lesson in all_lessons()}
    folder = next(iter(known.values())).path.parent
    tables = tomllib.loads((folder / _FILE).read_text(encoding="utf-8"))["track"]
    return [
        Track(table["name"], table["about"], tuple(known[number] for number in table["lessons"]))
        for table in tables
    ]


def track_of(lesson: Lesson) -> tuple[Track, int]:
    """Return the track of a lesson and its place there, from 1."""
    for track in tracks():
        if lesson in track.lessons:
            return track, track.lessons.index(lesson) + 1
    raise LookupError(f"lesson {lesson.number} is in no track of {_FILE}")


def lesson_after(number: int, done: Container[int] = ()) -> Lesson | None:
    """Return the next lesson in the order of the tracks that is not done; None after the last one."""
    order = [lesson for track in tracks() for lesson in track.lessons]
    place = [lesson.number for lesson in order].index(number)
    return next((lesson for lesson in order[place + 1 :] if lesson.number not in done), None)
