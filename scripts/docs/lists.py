"""The tables of lessons on the course page and the table of guides on the home page."""

from __future__ import annotations

import re
from pathlib import Path

from markup import table, text

from paceline.course.catalog import Lesson
from paceline.course.exercise import exercises
from paceline.course.tracks import tracks

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
SITUATIONS = {
    "one-script-four-gpus": "I have one script and four GPUs",
    "own-loop": "My training needs its own loop",
    "notebooks": "I work in a notebook",
    "slurm": "My cluster has Slurm",
    "time-limit": "My job hits the time limit",
    "it-hangs": "It hangs",
    "slower-on-four-gpus": "It got slower on four GPUs",
    "loss-differs": "The loss is different on four GPUs",
    "from-torchrun": "I have a torchrun script",
    "from-accelerate": "I use Accelerate",
    "from-lightning": "I use Lightning",
    "from-hf-trainer": "I use the Trainer of transformers",
    "foreign-scripts": "I want to start a script without changing it",
    "checkpoints": "I want to save, resume, check or export a run",
    "data": "My dataset does not fit into memory",
    "gpu": "I want the most out of a GPU",
}


def lessons_tables() -> str:
    """Return a table per track, with a row per lesson."""
    head = ["", "lesson", "what it teaches", "time", "exercise"]
    return "\n\n".join(
        f"### {track.name}\n\n{track.about}\n\n{table(head, list(map(_row, track.lessons)))}"
        for track in tracks()
    )


def _row(lesson: Lesson) -> list[str]:
    link = f"[{text(lesson.title)}](../lessons/{lesson.path.name})"
    exercise = "yes" if lesson.number in exercises(lesson.path.parent) else ""
    return [str(lesson.number), link, text(_begin(lesson.text)), f"{lesson.seconds} s", exercise]


def _begin(says: str) -> str:
    r"""Return the first two sentences below the title.

    >>> _begin("Lesson 0: one.\n\nA is B. It\nis so. And more.\n\n    run it\n")
    'A is B. It is so.'
    """
    sentences = re.split(r"(?<=[.?!])\s+", _paragraph(says))
    return re.sub(":$", ".", " ".join(sentences[:2]))


def _paragraph(says: str) -> str:
    """Return the first paragraph below a title."""
    return " ".join("".join(says.split("\n\n")[1:2]).split())


def situations_table() -> str:
    """Return one row per guide. Guides that SITUATIONS does not list come last, under their titles."""
    pages = {file.stem: file.read_text(encoding="utf-8") for file in sorted(GUIDES.glob("*.md"))}
    names = sorted(pages, key=lambda name: [*SITUATIONS, name].index(name))
    rows = [
        [
            f"[{SITUATIONS.get(name) or _title(pages[name])}](guides/{name}.md)",
            text(_paragraph(pages[name])),
        ]
        for name in names
    ]
    return table(["your situation", "in more words"], rows) if rows else ""


def _title(page: str) -> str:
    return page.partition("\n")[0].removeprefix("# ")
