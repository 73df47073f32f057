"""Write a Jupyter notebook per lesson: `python scripts/docs/notebooks.py FOLDER`. Works without torch and without Jupyter."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import Any

from figures import figure_of
from markup import text

from paceline.course.catalog import Lesson, all_lessons
from paceline.course.difference import code_of
from paceline.course.exercise import exercise_of, exercises
from paceline.course.tracks import track_of

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
ENDPOINT = "HOST:29400"
SETTINGS = """\
import os, sys
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # programs of this kernel
os.environ["OMP_NUM_THREADS"] = "1"  # the cores are shared by the ranks
os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # ranks wait until all are connected"""
TWO_AGENTS = """\
from paceline.world.address import free_port
PORT = free_port("127.0.0.1")"""


def main() -> None:
    """Write all notebooks into a folder."""
    parser = argparse.ArgumentParser(description="Write a Jupyter notebook per lesson.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    lessons = all_lessons()
    for lesson in lessons:
        file = folder / f"{lesson.path.stem}.ipynb"
        file.write_text(notebook(lesson), encoding="utf-8")
    print(f"wrote {len(lessons)} notebooks to {folder}")


def notebook(lesson: Lesson) -> str:
    """Return the notebook of a lesson as JSON, in format 4.5."""
    cells = [
        _introduction(lesson),
        _code(SETTINGS),
        *_files(lesson),
        _prose("## Run it", f"**Expect:** {text(lesson.notes['Expect'])}"),
        *_commands(lesson),
        *_exercise(lesson),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _prose(*paragraphs: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": "\n\n".join(paragraphs)}


def _code(source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source,
    }


def _introduction(lesson: Lesson) -> dict[str, Any]:
    """Return title, place in the course, prose, and the figure as an attachment."""
    track, place = track_of(lesson)
    file = IMAGES / figure_of(lesson.number)
    cell = _prose(
        f"# {lesson.number}. {lesson.title}",
        f"*{track.name}, {place} of {len(track.lessons)}; {lesson.notes['Time']}*",
        *map(text, lesson.prose),
        f"![{file.stem}](attachment:{file.name})",
    )
    picture = base64.b64encode(file.read_bytes()).decode()
    return cell | {"attachments": {file.name: {"image/svg+xml": picture}}}


def _files(lesson: Lesson) -> list[dict[str, Any]]:
    """Return cells that write the program and its batch script."""
    heading = f"New since lesson {lesson.before}"
    about = text(lesson.notes[heading]) if heading in lesson.notes else ""
    cells = [
        _prose("## The code", *([f"{heading}: {about}"] if about else [])),
        _program(lesson.path.name, lesson.source),
    ]
    scripts = sorted(lesson.path.parent.glob(f"{lesson.number:02d}_*.sh"))
    return [*cells, *(_code(f"%%writefile {one.name}\n{one.read_text()}") for one in scripts)]


def _program(name: str, source: str) -> dict[str, Any]:
    """Return a cell that writes a program without its docstring, which is prose here."""
    code = "\n".join(code_of(source)[0]).strip("\n")
    return _code(f"%%writefile {name}\n{code}\n")


def _commands(lesson: Lesson) -> list[dict[str, Any]]:
    """Return a cell per command. One for two nodes starts two agents here, without GPUs: they would use the same."""
    cells = []
    for line, remark in lesson.remarks.items():
        command = line.replace("lessons/", "")
        if ENDPOINT in command:
            cells.append(_code(TWO_AGENTS))
            agent = f"CUDA_VISIBLE_DEVICES= {command.replace(ENDPOINT, '127.0.0.1:{PORT}')}"
            command = f"{agent} & {agent}; wait"
        cells.append(_code(f"# {remark}\n!{command}" if remark else f"!{command}"))
    return cells


def _exercise(lesson: Lesson) -> list[dict[str, Any]]:
    """Return the task, the copy to edit as a cell, and the check."""
    if lesson.number not in exercises(lesson.path.parent):
        return []
    exercise = exercise_of(lesson)
    edit = "Edit the next cell and run it: it writes the file. Then run the check."
    return [
        _prose("## Exercise", text(exercise.task), edit),
        _program(exercise.name, exercise.source),
        _code(f"!paceline lesson {lesson.number} --check"),
    ]


if __name__ == "__main__":
    main()
