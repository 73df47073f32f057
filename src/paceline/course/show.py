"""How a lesson is shown: what it teaches, what is new in it, and what its run will show."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline import terminal
from paceline.course.catalog import Lesson
from paceline.course.difference import DiffLine, code_of, difference
from paceline.course.tracks import track_of

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {"+": "green", "-": "red", " ": "dim", "@": "cyan"}


def show_lesson(lesson: Lesson) -> None:
    """Print what to read before a lesson runs."""
    track, place = track_of(lesson)
    of_track = f"{track.name}, {place} of {len(track.lessons)}; {lesson.notes['Time']}"
    terminal.say(_styled(f"Lesson {lesson.number}: {lesson.title}", "bold"))
    terminal.say(_styled(of_track, "dim"))
    for paragraph in lesson.prose:
        terminal.say(f"\n{paragraph}")
    if lesson.before is None:
        terminal.say("\nThe code:\n")
        terminal.say("\n".join(f"  {line}" for line in code_of(lesson.source)[0]))
    else:
        heading = f"New since lesson {lesson.before}"
        terminal.say(f"\n{heading}: {lesson.notes[heading]}\n")
        show_difference(difference(lesson))
    terminal.say(f"\nExpect: {lesson.notes['Expect']}")


def show_difference(lines: Sequence[DiffLine]) -> None:
    """Print the lines of a difference, in colour on a terminal."""
    from rich.text import Text

    shown = []
    for line in lines:
        mark = "" if line.mark == "@" else f"{line.mark} "
        text = f"... in {line.text}:" if line.mark == "@" else line.text
        shown.append(Text(f"  {mark}{text}", _STYLES[line.mark]))
    terminal.say(Text("\n").join(shown))


def show_code(lesson: Lesson) -> None:
    """Print the whole file, with its syntax in colour on a terminal."""
    if not sys.stdout.isatty():
        print(lesson.source)
        return
    from rich.syntax import Syntax

    syntax = Syntax(lesson.source, "python", background_color="default", word_wrap=True)
    terminal.console().print(syntax)


def _styled(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style)
