"""Do the plans for a class add up and name real lessons, and does the script of the page grade a class?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.course.catalog import find_lesson, lessons_folder
from paceline.course.exercise import exercise_of, exercises

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
HEADINGS = "Half a day", "One day", "Two days"
LINK = re.compile(r"\[(\d+)\]\(\.\./lessons/(\w+\.py)\)")


def plan(heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading."""
    section = re.search(rf"^## {heading}\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)[1]
    lines = re.findall(r"^\| (\d.*) \|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def minute(clock: str) -> int:
    hour, minutes = clock.split(":")
    return 60 * int(hour) + int(minutes)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_plan_has_no_gap_and_each_block_has_lessons_and_a_goal(heading: str) -> None:
    rows = plan(heading)
    for row, after in pairwise(rows):
        assert minute(row[0]) + int(row[1]) == minute(after[0]), row
    for _, minutes, lessons, _, goal in rows:
        named = [find_lesson(number) for number, _ in LINK.findall(lessons)]
        assert [one.path.name for one in named] == [file for _, file in LINK.findall(lessons)]
        assert bool(goal) == (bool(named) or lessons == "own work"), lessons
        assert 60 * int(minutes) > 4 * sum(one.seconds for one in named), "no time to explain"


def test_one_day_follows_half_a_day() -> None:
    *_, last = plan("Half a day")
    first, *_ = plan("One day")
    assert minute(last[0]) + int(last[1]) == minute(first[0])


def test_an_exercise_is_planned_once_and_in_the_block_of_its_lesson() -> None:
    rows = [row for heading in HEADINGS for row in plan(heading)]
    planned = [number for row in rows for number in re.findall(r"\d+", row[3])]
    assert len(planned) == len(set(planned)) > 10
    assert {int(number) for number in planned} <= set(exercises(lessons_folder()))
    for row in rows:
        assert set(re.findall(r"\d+", row[3])) <= {number for number, _ in LINK.findall(row[2])}


def test_the_script_of_the_page_grades_a_class(tmp_path: Path) -> None:
    script = re.search(r'^```sh title="grade\.sh"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)[1]
    exercise = exercise_of(find_lesson("12"))
    for student in ("ada", "bob"):
        (tmp_path / "submissions" / student).mkdir(parents=True)
    (tmp_path / "submissions" / "ada" / exercise.name).write_text("unfinished\n")
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env = os.environ | path | {"XDG_DATA_HOME": str(tmp_path / "data")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    column = rows["student"].index("12")
    assert (rows["ada"][1], rows["ada"][column]) == ("0", "no")
    assert (rows["bob"][1], rows["bob"][column]) == ("0", "-")
    graded = json.loads((tmp_path / "ada.json").read_text())["exercises"]
    [hint] = [one["hint"] for one in graded if one["state"] == "open"]
    assert (
        hint
        == f"it fails at line 1 of {exercise.name}: NameError: name 'unfinished' is not defined"
    )
