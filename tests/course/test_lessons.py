"""Is each lesson a small difference from the one it grew out of, and does it say what is new?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from paceline.cli.main import run_verb
from paceline.course.catalog import Lesson, all_lessons, find_lesson
from support.program import started

ROOT = Path(__file__).resolve().parents[2]
LESSONS = all_lessons()
GROWN = [lesson for lesson in LESSONS if lesson.before is not None]


def parts(lesson: Lesson) -> dict[str, str]:
    """Return functions, classes, methods and constants of a lesson by name, as they are written."""
    tree = ast.parse(lesson.source.replace(f"lesson-{lesson.number}", "lesson-N"))
    named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    found = {node.name: ast.unparse(node) for node in named}
    for node in tree.body[1:]:
        if isinstance(node, ast.Assign):
            found |= constants(node)
        elif not isinstance(node, ast.Import | ast.ImportFrom) and node not in named:
            found["main"] += ast.unparse(node)  # how it is called
    return found


def constants(node: ast.Assign) -> dict[str, str]:
    """Return the constants of `A, B = 1, 2`, each by its name."""
    names, values = (
        part.elts if isinstance(part, ast.Tuple) else [part]
        for part in (node.targets[0], node.value)
    )
    return {name.id: ast.unparse(value) for name, value in zip(names, values, strict=True)}


def test_there_are_all_of_them_in_order() -> None:
    assert [lesson.number for lesson in LESSONS] == list(range(len(LESSONS)))


def test_pages_say_how_many_there_are() -> None:
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert set(re.findall(r"(\d+) lessons", text)) == {str(len(LESSONS))}


def test_all_grow_out_of_an_earlier_one_but_four_that_begin_anew() -> None:
    assert [lesson.number for lesson in LESSONS if lesson.before is None] == [0, 2, 12, 36]
    assert all(lesson.before < lesson.number for lesson in GROWN)


def test_a_lesson_is_shown_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["lesson", "4", "--show"]) == 0
    assert capsys.readouterr().out == find_lesson("4").source + "\n"


def test_a_lesson_says_what_it_shows_how_to_run_it_and_what_to_expect() -> None:
    for lesson in LESSONS:
        assert lesson.text.startswith(f"Lesson {lesson.number}: ")
        assert any(lesson.path.name in command for command in lesson.commands), lesson.number
        assert "\nExpect: " in lesson.text, lesson.number
        assert 0 < lesson.seconds < 60, lesson.number


def test_nothing_differs_but_what_the_lesson_names() -> None:
    for lesson in GROWN:
        before = find_lesson(str(lesson.before))
        earlier, mine = parts(before), parts(lesson)
        names = earlier.keys() | mine.keys()
        differs = {name for name in names if earlier.get(name) != mine.get(name)}
        new = lesson.new | enclosing(lesson, lesson.new) | enclosing(before, lesson.new)
        assert differs <= new, lesson.number
        named = {name for name in lesson.new if name in names}
        assert named <= differs, f"{lesson.number} names as new, but the same: {named - differs}"


@pytest.mark.slow
def test_a_lesson_runs_as_it_says(tmp_path: Path) -> None:
    with started("lesson", "4", folder=tmp_path) as running:
        done = running.wait(200)
    assert done.code == 0, done.out + done.err
    assert "accuracy" in done.out


def enclosing(lesson: Lesson, names: frozenset[str]) -> set[str]:
    """Return the classes whose methods are among the names, and the methods of classes that are."""
    found = set()
    for node in ast.walk(ast.parse(lesson.source)):
        if isinstance(node, ast.ClassDef):
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            found |= {node.name} if methods & names else set()
            found |= methods if node.name in names else set()
    return found
