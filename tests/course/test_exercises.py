"""Does every exercise refuse its hole with the right hint, and take its solution, and other ones that are right?"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from paceline.cli.main import run_verb
from paceline.course.attempt import Outcome
from paceline.course.catalog import find_lesson, lessons_folder
from paceline.course.exercise import Check, Exercise, exercise_of, exercises
from paceline.course.grade import crash, grade
from support.program import paceline, wait_until_gone

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from wrong_answers import wrong_answers

ANSWERS = wrong_answers()

HINTS = {
    0: "the sum 0, but 0 \\+ 1 \\+ 2 is 3: each rank still has only its own number",
    1: "NCCL connects GPUs",
    4: "the accuracies of the two ranks are [\\d., ]+: the models are not the same",
    6: "the epochs begin with the samples \\[.+\\], \\[.+\\]: it is the same order each time",
    8: "one process and two do not have the same curve \\(losses [\\d., ]+ in one epoch\\)",
    12: "the loss of epoch 3 is \\S+, but it should be near 0.01",
    13: "written after the epochs 2, 4, 2, 4,|written after the epochs 2, 2, 4, 4,",
    14: "they print the ranks 0, 0: there must be a rank 0 and a rank 1",
    15: "ran the epochs 1, 2, 1, 2, 3, 4, 1, 2, 3, 4: the second should run 3 and 4",
    18: "in two parts and in four the losses are",
    19: "the loss is 2\\.\\d+, as at the beginning",
    20: "it timed out after 15 s",
    21: "use 16, 16, 16, 16 rows",
    22: "the number of FSDP units is 1",
    23: "verify does not find the same bits on one rank and on two",
    24: "the weights of the convolution add up to [\\d., ]+ on the two ranks: they are no longer",
    25: "a stage has no gradients: only the last one has a loss to start from",
    26: "in stages 1 and 2, [\\d, ]+ % of the weights differ between the ranks",
    27: "the gradients of a single segment already differ from those without",
    30: "the scores of the two ranks differ from those of one process",
    31: "the tensor that was captured does not hold the images of the last batch",
    32: "the readers open shards [\\d,]+ times: more often than there are samples",
    28: "seems to take [\\d.]+ times as long as that of rank 1: rank 1 still waits",
    29: "a wrong learning rate on rank 0 is not found",
    33: "the two ranks are 0 of 1, 0 of 1, but they should be 0 of 2, 1 of 2",
    34: "four ranks cost 11.1 node-hours, but that is how long the training takes on the clock",
    35: "LoRA trains [\\d,]+ parameters, those of the base model among them",
}
"""What is said of the copy as it is."""

PIPELINE = "            if self.is_last:\n                outputs.backward()\n"
ONLINE = """\
                total = total + weights.sum(-1, keepdim=True)
                sums = sums + weights @ moving[1]
"""
ALL_PASSED = '(PASSED if kind == "opened" else ["PATH"])'
RIGHT = {
    1: ('"nccl"', '{"cpu": "gloo", "cuda": "nccl"}[device.type]'),
    12: (
        "            loss.backward()\n",
        "            self.model.zero_grad()\n            loss.backward()\n",
    ),
    18: ("(loss).backward()", "(loss / parts).backward()"),
    20: (
        "    if rank == 0:\n        dist.all_reduce(seen)\n",
        "    dist.reduce(seen, 0)\n    if rank == 0:\n",
    ),
    25: (
        PIPELINE,
        """\
            begin = outputs if self.is_last else outputs * self.receive(self.rank + 1, len(outputs))
            begin.sum().backward()
            if self.rank > 0:
                dist.send(inputs.grad, self.rank - 1)
""",
    ),
    33: (ALL_PASSED, '["PATH", "RANK", *own]'),
    34: ("return PLANNED_STEPS", "return -(-ranks // RANKS_PER_NODE) * PLANNED_STEPS"),
}
"""Other ways that are right: what the reader puts in the place of what."""

GRADED = [
    (12, "resets the gradients before the step"),  # a check
    (12, "resets the loss"),  # a known error
    (0, "only rank 0 calls the collective"),  # a rank that waits
]
"""Mistakes that are graded here, one per kind of hint; `scripts/wrong_answers.py` grades all of them."""


def exercise(number: int) -> Exercise:
    return exercise_of(find_lesson(str(number)))


def graded(number: int, source: str, folder: Path) -> str:
    """Return the hint that `paceline lesson N --check` gives for a copy; empty if it is right."""
    task = exercise(number)
    (folder / task.name).write_text(source, encoding="utf-8")
    done = paceline("lesson", str(number), "--check", "--json", folder=folder)
    found = json.loads(done.out)
    assert (found["lesson"], found["passed"]) == (number, done.code == 0)
    assert {one.name for one in folder.iterdir()} == {task.name, "tmp"}, (
        "a run left files beside the copy"
    )
    return found["hint"]


def changed(source: str, find: str, put: str) -> str:
    assert source.count(find) == 1
    return source.replace(find, put)


def test_what_is_taken_out_is_there_once() -> None:
    assert exercises(lessons_folder()) == sorted(HINTS)
    for number in HINTS:
        task = exercise(number)
        source = task.lesson.source
        for find, put in (*task.frame, (task.find, task.put)):
            source = changed(source, find, put)
        assert source == task.source
        assert all(re.compile(check.see).groupindex["value"] for check in task.checks)


def test_no_exercise_passes_with_an_empty_output_or_a_failed_check() -> None:
    """Outputs are made up: one that lacks a checked line, or that fails one check, must not pass."""
    for number in HINTS:
        task = exercise(number)
        assert judged(task, "", ended=True), f"lesson {number} accepts an empty output"
        assert judged(task, "", ended=False), f"lesson {number} accepts what did not end"
        assert judged(task, "", code=1), f"lesson {number} accepts a failure"
    for checks in (ALIKE + LOW, LOW + ALIKE):
        task = replace(exercise(12), checks=checks, errors=())
        assert judged(task, "rank 0: 7\nrank 1: 7\nloss 0.01") == ""
        assert judged(task, "rank 0: 7\nrank 1: 8\nloss 0.01") == "not alike"
        assert judged(task, "rank 0: 7\nrank 1: 7\nloss 9") == "too high"


ALIKE = (Check(r"rank \d: (?P<value>\S+)", "same", 0, "not alike"),)
LOW = (Check(r"loss (?P<value>\S+)", "below", 0.1, "too high"),)


def judged(task: Exercise, output: str, *, ended: bool = True, code: int = 0) -> str:
    """Return the hint for a run of a copy with this output."""
    with mock.patch("paceline.course.grade.attempt", return_value=Outcome(output, code, ended)):
        found = grade(task, Path(task.name))
    assert found.passed == (not found.hint)
    return found.hint


@pytest.mark.heavy  # scripts/wrong_answers.py grades the same; the solutions are graded
@pytest.mark.parametrize("number", HINTS)
def test_the_copy_gets_its_hint(number: int, tmp_path: Path) -> None:
    assert re.search(HINTS[number], graded(number, exercise(number).source, tmp_path))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(one, marks=[pytest.mark.heavy] * (place > 1))
        for place, one in enumerate(sorted(HINTS))
    ],
)
def test_the_solution_passes(number: int, tmp_path: Path) -> None:
    assert graded(number, exercise(number).solution, tmp_path) == ""


@pytest.mark.heavy  # scripts/wrong_answers.py grades the same; the solutions are graded
@pytest.mark.parametrize("number", RIGHT)
def test_another_way_that_is_right_passes(number: int, tmp_path: Path) -> None:
    assert graded(number, changed(exercise(number).source, *RIGHT[number]), tmp_path) == ""


@pytest.mark.heavy  # scripts/wrong_answers.py grades the same; the solutions are graded
@pytest.mark.parametrize(("number", "mistake"), GRADED)
def test_another_mistake_gets_another_hint(number: int, mistake: str, tmp_path: Path) -> None:
    [wrong] = [one for one in ANSWERS if (one.lesson, one.mistake) == (number, mistake)]
    source = changed(exercise(number).source, wrong.find, wrong.put)
    assert re.search(wrong.words, graded(number, source, tmp_path))


def test_each_mistake_is_a_program_and_has_a_hint_of_its_own() -> None:
    assert {one.lesson for one in ANSWERS} == set(HINTS)
    for number in HINTS:
        task, answers = exercise(number), [one for one in ANSWERS if one.lesson == number]
        hints = [check.hint for check in task.checks] + [check.missing for check in task.checks]
        hints += [hint for _, hint in task.errors] + [task.stuck]
        for wrong in answers:
            compile(changed(task.source, wrong.find, wrong.put), wrong.mistake, "exec")
            assert sum(bool(re.search(wrong.words, hint)) for hint in hints) == 1, wrong
        assert len({one.mistake for one in answers}) == len(answers)
        found = {hint for hint in hints for one in answers if re.search(one.words, hint)}
        assert len(found) == len(answers), "two mistakes get the same hint"


def test_an_error_is_shown_with_its_line(tmp_path: Path) -> None:
    told = "import os, sys\nsys.exit(os.environ['TORCH_DIST_INIT_BARRIER'])\n"
    for source, hint in (
        ("def main(:\n", "line 1 of lesson_12.py: SyntaxError"),
        ("x = 1\nx.y\n", "line 2 of lesson_12.py: AttributeError"),
        ("import sys\nsys.exit('no')\n", "exit code 1: no"),
        ("print('hello')\n", "leave the prints of the copy as they are"),
        (told, "exit code 1: 1"),  # without it gloo fails now and then while ranks still connect
    ):
        assert hint in graded(12, source, tmp_path)


def test_of_an_error_in_a_spawned_rank_its_own_line_is_shown() -> None:
    said = 'Traceback (most recent call last):\n  File "/a/lesson_13.py", line 85, in <module>\n    main()\n'
    said += "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated\n"
    said += (
        'Traceback (most recent call last):\n  File "/a/lesson_13.py", line 50, in train\n    x\n'
    )
    said += "NameError: name 'x' is not defined\n"
    assert (
        crash(said, "lesson_13.py")
        == "it fails at line 50 of lesson_13.py: NameError: name 'x' is not defined"
    )


def test_what_does_not_end_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    place, folder = tmp_path / "pid", tmp_path / "copy"
    folder.mkdir()
    rank = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(900)"
    agent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True)\n"
    (file := folder / "lesson_12.py").write_text(agent)
    assert "it was stopped after 10 s: a rank waits" in grade(exercise(12), file, 10).hint
    wait_until_gone(int(place.read_text()))


def test_try_writes_the_copy_once_and_check_grades_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert run_verb(["lesson", "12", "--check"]) == 2
    assert "start with `paceline lesson 12 --try`" in capsys.readouterr().err
    assert run_verb(["lesson", "12", "--try"]) == 0
    said, file = capsys.readouterr().out, tmp_path / "lesson_12.py"
    assert "which one?\n\nEdit lesson_12.py, then: paceline lesson 12 --check\n" in said
    assert file.read_text() == exercise(12).source
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("print('epoch 3: loss 0.01'); print('epoch 3: saved')\n")
    assert run_verb(["lesson", "12", "--try"]) == 0
    assert "was not changed. To start over, remove it" in capsys.readouterr().out
    assert run_verb(["lesson", "12", "--check"]) == 0
    right = f"right: lesson 12 is solved (1 of {len(HINTS)} exercises)"
    assert (
        capsys.readouterr().out
        == f"{right}\n\nNext: paceline lesson 13 ({exercise(13).lesson.title})\n"
    )
    file.write_text("print('epoch 3: loss 9'); print('epoch 3: saved')\n")
    assert run_verb(["lesson", "12", "--check"]) == 1
    assert capsys.readouterr().out.startswith("not yet: the loss of epoch 3 is 9,")


def test_the_list_marks_those_that_have_one(capsys) -> None:
    assert run_verb(["lesson"]) == 0
    marked = re.findall(r"^ *(\d+)  .*  exercise\b", capsys.readouterr().out, re.MULTILINE)
    assert sorted(map(int, marked)) == sorted(HINTS)
