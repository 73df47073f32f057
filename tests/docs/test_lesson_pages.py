"""Do the pages of lessons have a readable figure, the new lines, an output that is not stale, and the exercise?"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.course.catalog import Lesson, all_lessons, lessons_folder
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


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: str(lesson.number))
def test_a_page_has_prose_figure_new_lines_commands_and_exercise(
    lesson: Lesson, lesson_page
) -> None:
    page = lesson_page(lesson)
    assert page.startswith(f"# {lesson.number}. {lesson.title}\n")
    alt, figure = re.findall(r"^!\[(.+)\]\(\.\./\.\./images/(.+\.svg)\)$", page, re.MULTILINE)[0]
    assert len(alt) > 40
    assert (IMAGES / figure).is_file()
    assert '"""Lesson' not in page, "the docstring is prose, not code"
    marked = re.search(r'linenums="(\d+)"(?: hl_lines="([\d ]+)")?', page)
    above = int(marked[1]) - 1
    assert [above + int(word) for word in (marked[2] or "").split()] == new_lines(lesson)
    assert all(f"$ {command}\n" in page for command in lesson.commands)
    assert ("## Exercise" in page) == (lesson.number in exercises(lessons_folder()))
    if "## Exercise" in page:
        assert exercise_of(lesson).task.split("`")[0].split("[")[0].strip() in page


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: str(lesson.number))
def test_the_kept_output_is_of_the_commands_of_the_lesson(lesson: Lesson) -> None:
    text = (ROOT / "lessons" / "output" / f"{lesson.number:02d}.txt").read_text(encoding="utf-8")
    shown = [line.partition("    # ")[0] for line in text.splitlines() if line.startswith("$ ")]
    assert shown == [f"$ {command}" for command in lesson.commands]
    blocks = re.split(r"^\$ .*\n", text, flags=re.MULTILINE)[1:]
    assert blocks[-1].strip()
    assert not re.search(r"/(home|root|work|tmp)/", text), "a folder of some machine"


@pytest.mark.parametrize("file", sorted((IMAGES / "course").glob("*.svg")), ids=lambda f: f.stem)
def test_a_figure_is_well_formed_and_no_text_leaves_it(file: Path) -> None:
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert len(root.attrib["aria-label"]) > 40
    texts = [one for one in root.iter() if one.tag.endswith("}text")]
    assert len(texts) > 4
    for one in texts:
        kinds, long = one.attrib["class"].split(), len(one.text or "") * LETTER
        x, y = float(one.attrib["x"]), float(one.attrib["y"])
        left = x if "left" in kinds else x - long if "right" in kinds else x - long / 2
        assert left > 0, one.text
        assert left + long < width, one.text
        assert 20 < y < height - 8, one.text
    assert "prefers-color-scheme: dark" in file.read_text(encoding="utf-8")


def test_there_are_at_least_ten_figures_and_all_are_shown() -> None:
    names = {file.stem for file in (IMAGES / "course").glob("*.svg")}
    assert len(names) >= 10
    pages = [ROOT / "docs" / name for name in ("course.md", "cheat-sheet.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    listed = (ROOT / "scripts" / "docs" / "figures.py").read_text(encoding="utf-8")
    of_lessons = set(re.findall(r'\d: "([\w-]+)"', listed))
    assert names == of_lessons | set(re.findall(r"images/course/([\w-]+)\.svg", shown))
