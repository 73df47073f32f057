"""Which lessons are there, and what does each say of itself? Its docstring tells all: title, how to run it, what is new."""

from __future__ import annotations

import ast
import re
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.errors import ConfigError, EnvironmentUnfit

_NAME = re.compile(r"(\d\d)_\w+\.py")
_TITLE = re.compile(r"Lesson (\d+): (.+?)\.?$", re.MULTILINE)
_COMMAND = re.compile(r"^    (?=\S)(.+?)(?: {2,}(.*))?$", re.MULTILINE)
_TIME = re.compile(r"^Time: about (\d+) s\b", re.MULTILINE)
_NEW = re.compile(r"^New since lesson (\d+): (.+?)(?=\n\S+:|\Z)", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`([A-Za-z_]\w*)`")


@dataclass(frozen=True)
class Lesson:
    """One lesson: a file that runs."""

    number: int
    path: Path

    @cached_property
    def source(self) -> str:
        """The file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def text(self) -> str:
        """What it says of itself."""
        return ast.get_docstring(ast.parse(self.source)) or ""

    @property
    def title(self) -> str:
        """What it shows, in a few words."""
        found = _TITLE.search(self.text)
        return found[2] if found else self.path.stem

    @property
    def commands(self) -> tuple[str, ...]:
        """How it is run, line by line; what stands behind two spaces is a remark."""
        return tuple(line for line, _ in _COMMAND.findall(self.text))

    @property
    def failing(self) -> frozenset[str]:
        """The commands that are meant to fail, to show how that looks: their remark begins with "fails"."""
        return frozenset(
            line for line, remark in _COMMAND.findall(self.text) if remark.startswith("fails")
        )

    @property
    def seconds(self) -> int:
        """How long all of it takes on two cores; 0: it does not say."""
        found = _TIME.search(self.text)
        return int(found[1]) if found else 0

    @property
    def before(self) -> int | None:
        """The lesson that it grew out of."""
        found = _NEW.search(self.text)
        return int(found[1]) if found else None

    @property
    def new(self) -> frozenset[str]:
        """What differs from that lesson: functions, methods, classes and constants."""
        found = _NEW.search(self.text)
        return frozenset(_QUOTED.findall(found[2])) if found else frozenset()


def lessons_folder() -> Path:
    """Return where the lessons are: beside the source, or where the package was installed to."""
    beside = Path(__file__).resolve().parents[3] / "lessons"
    installed = Path(sysconfig.get_path("data")) / "share" / "paceline" / "lessons"
    for folder in (beside, installed):
        if any(folder.glob("00_*.py")):
            return folder
    raise EnvironmentUnfit(
        "the lessons are not here", fix="install Paceline again, or run it from its source"
    )


def all_lessons(folder: Path | None = None) -> list[Lesson]:
    """Return all lessons in their order."""
    place = folder or lessons_folder()
    found = [
        (match, file) for file in sorted(place.iterdir()) if (match := _NAME.fullmatch(file.name))
    ]
    return [Lesson(int(match[1]), file) for match, file in found]


def find_lesson(word: str, folder: Path | None = None) -> Lesson:
    """Return the lesson of a number."""
    lessons = all_lessons(folder)
    for lesson in lessons:
        if word.isdecimal() and lesson.number == int(word):
            return lesson
    last = lessons[-1].number
    raise ConfigError(
        f"there is no lesson {word!r}",
        fix=f"give a number from 0 to {last}; `paceline lesson` lists them",
    )
