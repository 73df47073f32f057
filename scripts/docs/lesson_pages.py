"""The page of a lesson on the site: prose, a figure, the code with its new lines marked, its output, and the exercise."""

from __future__ import annotations

import re
from pathlib import Path

from figures import figure_of
from markup import text

from paceline.course.catalog import Lesson
from paceline.course.difference import code_of, new_lines
from paceline.course.exercise import exercise_of, exercises
from paceline.course.tracks import track_of

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_ALT = re.compile(r'aria-label="([^"]+)"')
_UP = "../../images"
"""The images, as seen from a page below project/lessons/."""


def lesson_page(lesson: Lesson) -> str:
    """Return the page in Markdown."""
    parts = [
        f"# {lesson.number}. {lesson.title}",
        _place(lesson),
        *map(text, lesson.prose),
        _figure(lesson.number),
        *_code(lesson),
        *_runs(lesson),
        *_exercise(lesson),
    ]
    return "\n\n".join(parts) + "\n"


def _place(lesson: Lesson) -> str:
    track, place = track_of(lesson)
    return f"*{track.name}, {place} of {len(track.lessons)}; {lesson.notes['Time']}* `paceline lesson {lesson.number}`"


def _figure(number: int) -> str:
    name = figure_of(number)
    found = _ALT.search((IMAGES / name).read_text(encoding="utf-8"))
    return f"![{found[1] if found else ''}]({_UP}/{name})"


def _code(lesson: Lesson) -> list[str]:
    """Return the code below the docstring, under what is new in it."""
    code, above = code_of(lesson.source)
    marked = " ".join(str(number - above) for number in new_lines(lesson))
    options = f'title="lessons/{lesson.path.name}" linenums="{above + 1}"'
    options += f' hl_lines="{marked}"' if marked else ""
    listing = "\n".join([f"````{{.python {options}}}", *code, "````"])
    if lesson.before is None:
        return ["## The code", listing]
    heading = f"New since lesson {lesson.before}"
    return [f"## {heading}", f"New lines are marked: {text(lesson.notes[heading])}", listing]


def _runs(lesson: Lesson) -> list[str]:
    """Return the commands, what to expect, and the output of a real run."""
    commands = "\n".join(["```console", *(f"$ {line}" for line in lesson.commands), "```"])
    expect = f"**Expect:** {text(lesson.notes['Expect'])}"
    file = lesson.path.parent / "output" / f"{lesson.number:02d}.txt"
    if not file.exists():
        return ["## Run it", commands, expect]
    output = f"````text\n{file.read_text(encoding='utf-8')}````"
    fold = f'<details markdown="1"><summary>The output of a run on 2 cores</summary>\n\n{output}\n\n</details>'
    return ["## Run it", commands, expect, fold]


def _exercise(lesson: Lesson) -> list[str]:
    if lesson.number not in exercises(lesson.path.parent):
        return []
    number = lesson.number
    lines = [f"$ paceline lesson {number} --try", f"$ paceline lesson {number} --check"]
    return [
        "## Exercise",
        text(exercise_of(lesson).task),
        "\n".join(["```console", *lines, "```"]),
    ]
