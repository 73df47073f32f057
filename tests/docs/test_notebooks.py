"""Has each lesson a valid notebook with all its parts, and does one run in a real kernel?"""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.course.catalog import all_lessons, lessons_folder
from paceline.course.exercise import exercise_of, exercises
from support.kernel import kernel_environment
from support.typed_pages import ROOT

pytestmark = pytest.mark.skipif(
    not find_spec("nbclient") or not find_spec("ipykernel"),
    reason="needs nbclient and ipykernel (pip install nbclient ipykernel)",
)
SCRIPT = ROOT / "scripts" / "docs" / "notebooks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("books") / "new"
    command = [sys.executable, "-B", str(SCRIPT), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return place


def test_a_notebook_is_valid_and_has_prose_figure_code_commands_and_exercise(folder: Path) -> None:
    import nbformat

    for lesson in all_lessons():
        book = nbformat.read(folder / f"{lesson.path.stem}.ipynb", as_version=4)
        nbformat.validate(book)
        prose = [cell["source"] for cell in book.cells if cell["cell_type"] == "markdown"]
        cells = [cell["source"] for cell in book.cells if cell["cell_type"] == "code"]
        assert prose[0].startswith(f"# {lesson.number}. {lesson.title}\n")
        [picture] = book.cells[0]["attachments"]
        assert f"(attachment:{picture})" in prose[0]
        written = [cell.removeprefix("%%writefile ") for cell in cells if cell.startswith("%%")]
        files = dict(cell.split("\n", 1) for cell in written)
        assert body(files[lesson.path.name]) == body(lesson.source)
        typed = [cell.rpartition("\n")[2] for cell in cells if "\n!" in f"\n{cell}"]
        for command, cell in zip(lesson.commands, typed, strict=False):
            assert command.replace("lessons/", "").split("HOST:")[0] in cell
            assert cell.startswith("!") and "HOST" not in cell
        checks = []
        if lesson.number in exercises(lessons_folder()):
            exercise = exercise_of(lesson)
            assert body(files[exercise.name]) == body(exercise.source)
            checks = [f"!paceline lesson {lesson.number} --check"]
        assert typed[len(lesson.commands) :] == checks


def body(source: str) -> str:
    """Return a program without comments and without its docstring."""
    tree = ast.parse(source)
    if ast.get_docstring(tree):
        del tree.body[0]
    return ast.dump(tree)


@pytest.mark.slow
@pytest.mark.heavy  # tests/notebook runs cells in a kernel, and tests/course grades
@pytest.mark.timeout(900)
def test_a_notebook_runs_in_a_kernel_and_its_exercise_is_graded(
    folder: Path, tmp_path: Path
) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(folder / "12_single_device.ipynb", as_version=4)
    client = NotebookClient(book, timeout=400, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=kernel_environment(tmp_path))
    outputs = [cell["outputs"] for cell in book.cells if cell["cell_type"] == "code"]
    *_, run, _, check = ["".join(one.get("text", "") for one in each) for each in outputs]
    assert "epoch 6: loss 0.01" in run
    assert (tmp_path / "lesson-12.pt").is_file()
    assert check.startswith("not yet: ")
