"""Is each lesson a small difference from the one it grew out of, and does it say what is new?"""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import pytest

from paceline.cli.main import run_verb
from paceline.course.catalog import Lesson, all_lessons, find_lesson

ROOT = Path(__file__).resolve().parents[2]
LESSONS = all_lessons()
IDS = [f"{lesson.number}" for lesson in LESSONS]
GROWN = [lesson for lesson in LESSONS if lesson.before is not None]
_TWO_SCREENS = 140
MAIN = {
    1: (3, 4), 3: (3, 5), 4: (4, 5), 5: (1, 11), 6: (2, 1), 7: (8, 8), 8: (4, 11), 9: (2, 11), 10: (1, 2), 11: (7, 10), 13: (3, 6),
    14: (6, 9), 15: (0, 1), 16: (1, 2), 17: (1, 5), 18: (4, 7), 19: (4, 10), 20: (2, 7), 21: (14, 14), 22: (2, 10), 23: (20, 9), 24: (4, 4),
    25: (17, 23), 26: (16, 12), 27: (19, 17), 28: (14, 22), 29: (14, 22), 30: (5, 16), 31: (18, 23), 32: (23, 7), 33: (7, 15), 34: (16, 14), 35: (21, 22),
}  # fmt: skip
"""How many lines of `main` a lesson may take away, and add. 21 trains a GPT, 23 leaves the loop to Paceline."""
TIMED = 7
"""Its `main` runs the file at several sizes, and what was `main` is `train`."""


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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_say_how_many_there_are(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"(\d+) lessons", text)) == {str(len(LESSONS))}


def test_all_grow_out_of_an_earlier_one_but_three_that_begin_anew() -> None:
    assert [lesson.number for lesson in LESSONS if lesson.before is None] == [0, 2, 12]
    assert all(lesson.before < lesson.number for lesson in GROWN)


def test_lesson_3_takes_from_lesson_1_what_it_says() -> None:
    first, third = parts(find_lesson("1")), parts(find_lesson("3"))
    assert {name: third[name] for name in ("pick_device", "join")} == {
        name: first[name] for name in ("pick_device", "join")
    }


def test_a_lesson_is_shown_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["lesson", "4", "--show"]) == 0
    assert capsys.readouterr().out == find_lesson("4").source + "\n"


@pytest.mark.parametrize("lesson", LESSONS, ids=IDS)
def test_a_lesson_says_what_it_shows_how_to_run_it_and_what_to_expect(lesson: Lesson) -> None:
    assert lesson.text.startswith(f"Lesson {lesson.number}: ")
    assert any(lesson.path.name in command for command in lesson.commands)
    assert "\nExpect: " in lesson.text
    assert 0 < lesson.seconds < 60
    assert lesson.source.count("\n") <= _TWO_SCREENS


@pytest.mark.parametrize("lesson", GROWN, ids=[f"{lesson.number}" for lesson in GROWN])
def test_nothing_differs_but_what_the_lesson_names(lesson: Lesson) -> None:
    earlier, mine = parts(find_lesson(str(lesson.before))), parts(lesson)
    differs = {name for name in earlier.keys() | mine.keys() if earlier.get(name) != mine.get(name)}
    assert differs <= lesson.new | enclosing(lesson, lesson.new) | enclosing(
        find_lesson(str(lesson.before)), lesson.new
    )
    named = {name for name in lesson.new if name in earlier or name in mine}
    assert named <= differs, f"named as new, but the same: {named - differs}"


@pytest.mark.parametrize("lesson", GROWN, ids=[f"{lesson.number}" for lesson in GROWN])
def test_main_stays_what_it_was_but_for_some_lines(lesson: Lesson) -> None:
    moved = "train" if lesson.number == TIMED else "main"
    old, new = (
        parts(find_lesson(str(lesson.before)))["main"].splitlines(),
        parts(lesson)[moved].splitlines(),
    )
    kept = sum(
        block.size
        for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    )
    less, more = MAIN[lesson.number]
    assert len(old) - kept <= less
    assert len(new) - kept <= more


def enclosing(lesson: Lesson, names: frozenset[str]) -> set[str]:
    """Return the classes whose methods are among the names, and the methods of classes that are."""
    found = set()
    for node in ast.walk(ast.parse(lesson.source)):
        if isinstance(node, ast.ClassDef):
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            found |= {node.name} if methods & names else set()
            found |= methods if node.name in names else set()
    return found
