"""Do the pages of lessons have a readable figure, the new lines, an output that is not stale, and the exercise?"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.course.catalog import all_lessons, lessons_folder
from paceline.course.difference import new_lines
from paceline.course.exercise import exercise_of, exercises

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
LESSONS = all_lessons()
LETTER = 7.1
"""The width of a letter of 14 px, a little more than the mean."""


@pytest.fixture
def lesson_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    from lesson_pages import lesson_page

    yield lesson_page
    for name in [name for name in sys.modules if name in {"markup", "canvas", "lesson_pages"} or name.startswith("figures")]:  # fmt: skip
        del sys.modules[name]


def test_a_page_has_prose_figure_new_lines_commands_and_exercise(lesson_page) -> None:
    for lesson in LESSONS:
        page = lesson_page(lesson)
        assert page.startswith(f"# {lesson.number}. {lesson.title}\n")
        [[alt, figure], *_] = re.findall(r"^!\[(.+)\]\(\.\./\.\./images/(.+\.svg)\)$", page, re.MULTILINE)  # fmt: skip
        assert len(alt) > 40
        assert (IMAGES / figure).is_file()
        assert '"""Lesson' not in page, "the docstring is prose, not code"
        marked = re.search(r'linenums="(\d+)"(?: hl_lines="([\d ]+)")?', page)
        above = int(marked[1]) - 1
        assert [above + int(word) for word in (marked[2] or "").split()] == new_lines(lesson)
        assert all(f"$ {command}\n" in page for command in lesson.commands)
        has_exercise = lesson.number in exercises(lessons_folder())
        assert ("## Exercise" in page) == has_exercise
        if has_exercise:
            assert exercise_of(lesson).task.split("`")[0].split("[")[0].strip() in page


def test_the_kept_output_is_of_the_commands_of_the_lesson() -> None:
    for lesson in LESSONS:
        file = ROOT / "lessons" / "output" / f"{lesson.number:02d}.txt"
        text = file.read_text(encoding="utf-8")
        shown = [line.partition("    # ")[0] for line in text.splitlines() if line.startswith("$ ")]
        assert shown == [f"$ {command}" for command in lesson.commands]
        assert re.split(r"^\$ .*\n", text, flags=re.MULTILINE)[-1].strip()
        assert not re.search(r"/(home|root|work|tmp)/", text), "a folder of some machine"


def test_a_figure_is_well_formed_and_no_text_leaves_it() -> None:
    files = sorted((IMAGES / "course").glob("*.svg"))
    for file in files:
        source = file.read_text(encoding="utf-8")
        root = ElementTree.fromstring(source)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        texts = [one for one in root.iter() if one.tag.endswith("}text")]
        assert len(root.attrib["aria-label"]) > 40 and len(texts) > 4, file
        for one in texts:
            kinds, long = one.attrib["class"].split(), len(one.text or "") * LETTER
            x, y = float(one.attrib["x"]), float(one.attrib["y"])
            left = x if "left" in kinds else x - long if "right" in kinds else x - long / 2
            assert 0 < left < width - long and 20 < y < height - 8, f"{file}: {one.text}"
        assert "prefers-color-scheme: dark" in source
    pages = [ROOT / "docs" / name for name in ("course.md", "cheat-sheet.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    listed = (ROOT / "scripts" / "docs" / "figures.py").read_text(encoding="utf-8")
    of_lessons = set(re.findall(r'\d: "([\w-]+)"', listed))
    in_pages = set(re.findall(r"images/course/([\w-]+)\.svg", shown))
    assert {file.stem for file in files} == of_lessons | in_pages
