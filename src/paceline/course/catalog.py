"""The lessons. A lesson's docstring holds its title, its commands, and what is new in it."""

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
_LABEL = re.compile(r"^(Expect|Time|Over several nodes|New since lesson \d+): ", re.MULTILINE)


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
        """The docstring."""
        return ast.get_docstring(ast.parse(self.source)) or ""

    @property
    def title(self) -> str:
        """The title."""
        found = _TITLE.search(self.text)
        return found[2] if found else self.path.stem

    @property
    def prose(self) -> tuple[str, ...]:
        """The paragraphs between the title and the commands, each on one line."""
        above = _COMMAND.split(self.text, maxsplit=1)[0].strip().split("\n\n")[1:]
        return tuple(" ".join(paragraph.split()) for paragraph in above)

    @property
    def notes(self) -> dict[str, str]:
        """The texts after `Expect:`, `Time:` and the other labels, each on one line."""
        _, *parts = _LABEL.split(self.text)
        texts = (" ".join(text.split()) for text in parts[1::2])
        return dict(zip(parts[::2], texts, strict=True))

    @property
    def remarks(self) -> dict[str, str]:
        """The command lines, each with its remark."""
        return dict(_COMMAND.findall(self.text))

    @property
    def commands(self) -> tuple[str, ...]:
        """The command lines, without the remarks after two spaces."""
        return tuple(self.remarks)

    @property
    def failing(self) -> frozenset[str]:
        """The commands that fail on purpose: their remark begins with "fails"."""
        return frozenset(
            line for line, remark in self.remarks.items() if remark.startswith("fails")
        )

    @property
    def seconds(self) -> int:
        """How long all commands take on two cores; 0 if the lesson does not say."""
        found = _TIME.search(self.text)
        return int(found[1]) if found else 0

    @property
    def before(self) -> int | None:
        """The number of the lesson that this one extends."""
        found = _NEW.search(self.text)
        return int(found[1]) if found else None

    @property
    def new(self) -> frozenset[str]:
        """The functions, methods, classes and constants that differ from that lesson."""
        found = _NEW.search(self.text)
        return frozenset(_QUOTED.findall(found[2])) if found else frozenset()


def lessons_folder() -> Path:
    """Return the folder of the lessons: in the source tree, or in the installation."""
    beside = Path(__file__).resolve().parents[3] / "lessons"
    installed = Path(sysconfig.get_path("data")) / "share" / "paceline" / "lessons"
    for folder in (beside, installed):
        if any(folder.glob("00_*.py")):
            return folder
    raise EnvironmentUnfit(
        f"there are no lessons in {beside} or {installed}",
        fix="reinstall Paceline, or run it from its source tree",
    )


def all_lessons(folder: Path | None = None) -> list[Lesson]:
    """Return all lessons, by number."""
    lessons = []
    for file in sorted((folder or lessons_folder()).iterdir()):
        match = _NAME.fullmatch(file.name)
        if match:
            lessons.append(Lesson(int(match[1]), file))
    return lessons


def find_lesson(word: str, folder: Path | None = None) -> Lesson:
    """Return the lesson with this number."""
    lessons = all_lessons(folder)
    for lesson in lessons:
        if word.isdecimal() and lesson.number == int(word):
            return lesson
    last = lessons[-1].number
    raise ConfigError(
        f"there is no lesson {word!r}",
        fix=f"give a number from 0 to {last}; `paceline lesson` lists them",
    )
