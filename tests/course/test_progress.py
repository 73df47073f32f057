"""Is progress kept, named, and safe against a damaged file? Are grades of a student and of a class right?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.cli.main import run_verb
from paceline.course.catalog import all_lessons, lessons_folder
from paceline.course.exercise import exercises
from paceline.course.progress import Progress, add_progress, progress_file, read_progress

SOLVED = "print('epoch 3: loss 0.01'); print('epoch 3: saved')\n"
"""Prints what the check of exercise 12 wants to see."""

EXERCISES = len(exercises(lessons_folder()))


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def test_what_is_done_is_added_in_a_private_file() -> None:
    assert read_progress() == Progress()
    assert add_progress(ran=[0]) == ""
    assert add_progress(ran=[4], solved=[4]) == ""
    assert read_progress() == Progress(frozenset({0, 4}), frozenset({4}))
    file = progress_file(os.environ)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in file.parent.iterdir()] == ["course.json"]


@pytest.mark.parametrize(
    "damage", ["", "{", "[" * 100_000, "[1]", '{"ran": 7, "solved": "x"}', "\x00" * 3_000_000, None]
)
def test_a_damaged_file_is_set_aside_and_stops_nothing(damage: str | None) -> None:
    file = progress_file(os.environ)
    file.parent.mkdir(parents=True)
    if damage is None:
        os.mkfifo(file)  # is not waited for
    else:
        file.write_text(damage)
    assert read_progress() == Progress()
    assert add_progress(ran=[2]) == ""
    assert read_progress().ran == {2}
    if damage is not None:
        assert file.with_suffix(".damaged").read_text() == damage


def test_a_folder_that_cannot_be_written_is_named_and_stops_nothing(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    (tmp_path / "data").write_text("a file in the way")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    (tmp_path / "lesson_12.py").write_text(SOLVED)
    assert run_verb(["lesson", "12", "--check"]) == 0
    said = capsys.readouterr()
    assert f"right: lesson 12 is solved (0 of {EXERCISES} exercises)" in said.out
    assert f"Your progress was not saved ({tmp_path}/data/paceline/course.json: " in said.err


def test_the_list_shows_what_is_done_and_what_is_next(capsys) -> None:
    add_progress(ran=[0, 1, 2], solved=[0, 1])
    assert run_verb(["lesson"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith("  ")}
    assert rows["1"].endswith("  ran  exercise solved")
    assert rows["2"].endswith("  ran")
    assert rows["4"].endswith("       exercise")
    done = f"3 of {len(all_lessons())} lessons ran, 2 of {EXERCISES} exercises solved."
    assert f"{done}\nNext: paceline lesson 3\n" in said
    assert run_verb(["lesson", "--json"]) == 0
    by_number = {one["number"]: one for one in json.loads(capsys.readouterr().out)["lessons"]}
    assert (by_number[1]["ran"], by_number[1]["solved"]) == (True, True)
    assert (by_number[2]["ran"], by_number[2]["solved"]) == (True, False)
    assert by_number[20]["track"] == "Production"


def test_the_solution_is_shown_as_what_it_changes(capsys) -> None:
    assert run_verb(["lesson", "12", "--solution"]) == 0
    said = capsys.readouterr().out
    assert "+             self.optimizer.zero_grad()\n" in said
    assert said.count("\n  + ") == 1


def test_all_exercises_of_a_student_are_graded_and_a_class_is_a_table(
    tmp_path: Path, capsys
) -> None:
    (tmp_path / "lesson_12.py").write_text(SOLVED)
    (tmp_path / "lesson_15.py").write_text("raise SystemExit(4)\n")
    assert run_verb(["lesson", "--check", "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    states = {one["lesson"]: one["state"] for one in found["exercises"]}
    assert (found["solved"], states[12], states[15], states[0]) == (1, "solved", "open", "missing")
    assert len(states) == EXERCISES
    (tmp_path / "ada.json").write_text(json.dumps(found))
    (tmp_path / "bob.json").write_text('{"exercises": [{"lesson": 0, "state": "solved"}]}')
    assert run_verb(["lesson", "--grades", "ada.json", "bob.json"]) == 0
    head, ada, bob = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:4] == ["student", "solved", "0", "1"]
    assert dict(zip(head, ada, strict=True))["12"] == "yes"
    assert dict(zip(head, ada, strict=True))["15"] == "no"
    assert bob[:4] == ["bob", "1", "yes", "-"]


def test_a_file_without_grades_and_two_of_one_name_are_refused(tmp_path: Path, capsys) -> None:
    for content in (
        "",
        "[]",
        '{"exercises": 3}',
        '{"exercises": [{"lesson": "0", "state": "solved"}]}',
    ):
        (tmp_path / "eve.json").write_text(content)
        assert run_verb(["lesson", "--grades", "eve.json"]) == 2
        assert "eve.json" in capsys.readouterr().err
    assert run_verb(["lesson", "--grades", "a/x.json", "b/x.json"]) == 2
    (tmp_path / "x.json").write_text('{"exercises": []}')
    assert run_verb(["lesson", "--grades", "x.json", "./x.json"]) == 2
    assert "'x'" in capsys.readouterr().err
