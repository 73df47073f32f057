"""Does `--json` print what the documents say, no key more and none less? (bench, scale, profile: where they really run.)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.commands import COMMANDS, load
from paceline.cli.main import run_verb
from paceline.config.arguments import arguments_of
from paceline.hang.verdict import HangVerdict, write_verdict
from paceline.rundir import make_private
from support import report_trainings as trainings
from support import run_folders as runs
from support.documented import DOCUMENTS, keys_of, words_of


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def printed(capsys, *words: str) -> Any:
    assert run_verb([*words, "--json"]) in {0, 1}
    return json.loads(capsys.readouterr().out)


def keys_within(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from keys_within(part)


def test_watch(tmp_path: Path, capsys) -> None:
    folder = runs.make_run(tmp_path / "runs" / "run", runs.started(), *runs.trained(1, 51))
    make_private(folder.hang_verdict.parent)
    write_verdict(folder, HangVerdict("stuck", (1,), (0,), "x"))
    for rank in range(2):
        runs.put_beat(folder, rank, own_s=0.1 + rank)
    with runs.holding(folder.lock):
        found = printed(capsys, "watch", "run")
    assert set(found) == keys_of("json.md", "watch")
    inner = {*found["hang"], *found["slowest"], *found["checkpoint"]}
    assert inner - words_of("json.md", "watch") == set()
    assert (found["hang"]["ranks"], found["slowest"]["beat"]["rank"]) == ([1], 1)


def test_cluster(capsys) -> None:
    found = printed(capsys, "cluster", "list")
    assert {*found, *found["profiles"][0]} <= words_of("json.md", "Other verbs")
    assert {"name": "generic", "own": False} in found["profiles"]
    assert printed(capsys, "cluster", "show", "generic")["partition"] == ""


def test_lesson(tmp_path: Path, capsys) -> None:
    found = printed(capsys, "lesson")
    assert {*found, *found["lessons"][0]} <= words_of("json.md", "Other verbs")
    (tmp_path / "lesson_12.py").write_text("raise SystemExit(4)\n")
    graded = printed(capsys, "lesson", "12", "--check")
    assert set(graded) <= words_of("json.md", "Other verbs")
    assert (graded["lesson"], graded["passed"], "exit code 4" in graded["hint"]) == (
        12,
        False,
        True,
    )


def test_report(tmp_path: Path, capsys) -> None:
    folder = trainings.make_training(tmp_path / "runs" / "run", "name=run")
    trainings.measure(folder)
    trainings.note_rank_times(folder, 8, slow=5)
    [found] = printed(capsys, "report", "run")["runs"]
    assert set(found) == keys_of("report.md", "The keys of `--json`")
    [study], verdict = found["scaling"].values(), found["profile"]
    assert {*study, *study["sizes"][0]} == keys_of("scale.md", "JSON")
    assert set(verdict) == keys_of("profile.md", "Keys of verdict.json")


def test_hang_and_doctor(tmp_path: Path, capsys) -> None:
    runs.make_run(tmp_path / "runs" / "run", runs.started())
    assert set(printed(capsys, "hang", "run")) == keys_of("hang.md", "`paceline hang RUN`")
    text = "#!/bin/bash\n#SBATCH -N 2\nsrun torchrun --nnodes 2 train.py\n"
    (tmp_path / "job.sh").write_text(text)
    keys = {*keys_within(printed(capsys, "doctor", "job.sh"))}
    assert keys - words_of("doctor.md", "JSON") == set()


def test_every_verb_that_has_it_is_named() -> None:
    listed = (DOCUMENTS / "json.md").read_text(encoding="utf-8").partition("\n## ")[0]
    for name, verb in COMMANDS.items():
        has_json = False
        for command in verb.actions.values() if verb.actions else [verb]:
            _, kind = load(command)
            has_json |= any(argument.name == "json" for argument in arguments_of(kind))
        assert has_json == (f"`{name}`" in listed), name
