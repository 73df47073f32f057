"""Do the plans for a class add up and name real lessons, and does the script of the page grade a class?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

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


def test_the_plans_have_no_gap_and_name_real_lessons_and_exercises() -> None:
    plans = {heading: plan(heading) for heading in HEADINGS}
    plans["Half a day, and one"] = [plans["Half a day"][-1], plans["One day"][0]]
    for rows in plans.values():
        for row, after in pairwise(rows):
            assert minute(row[0]) + int(row[1]) == minute(after[0]), row
    rows = [row for heading in HEADINGS for row in plans[heading]]
    for _, _, lessons, planned, goal in rows:
        named = LINK.findall(lessons)
        assert [find_lesson(number).path.name for number, _ in named] == [file for _, file in named]
        assert bool(goal) == (bool(named) or lessons == "own work"), lessons
        assert set(re.findall(r"\d+", planned)) <= {number for number, _ in named}
    numbers = [int(number) for row in rows for number in re.findall(r"\d+", row[3])]
    assert len(numbers) == len(set(numbers)) > 10
    assert set(numbers) <= set(exercises(lessons_folder()))


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
    assert f"line 1 of {exercise.name}: NameError" in hint
