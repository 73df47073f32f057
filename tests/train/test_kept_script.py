"""The script of a run: its name, its text in the run folder, and what is said when it is another one or has changed."""

from __future__ import annotations

import os
import runpy
import stat
import sys
from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.main_script import MainScript, Sources, main_script, script_at
from paceline.rundir import RunDir
from paceline.verified import facts_of, remember, save_facts, what_is_shown

TRAINING = """
import torch, paceline
from rates import RATE

with paceline.Run(paceline.config_from_argv()) as run:
    model = run.model(torch.nn.Linear(2, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    for step in run.steps((torch.ones(8, 2),)):
        run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)
"""
WORDS = ("batch.global_size=8", "batch.lanes=4", "checkpoint.every=end")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rates.py").write_text("RATE = 0.5\n")
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path


@pytest.fixture
def train(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: str, script: str = "train.py") -> str:
        sys.modules.pop("rates", None)
        monkeypatch.setattr(sys, "argv", [script, *WORDS, *words])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is edited within a second
        capsys.readouterr()
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return run


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_a_run_is_called_like_its_script_and_keeps_it(home: Path, train) -> None:
    (home / "other.py").write_text(TRAINING)
    assert "resumed" not in train("epochs=1") + train("epochs=1", script="other.py")
    [version] = (home / "runs/train/script").iterdir()
    assert {path.name: path.read_text() for path in version.iterdir()} == {
        "train.py": TRAINING,
        "rates.py": "RATE = 0.5\n",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in version.iterdir()} == {0o600}
    assert RunDir(home / "runs/other").checkpoints.is_dir()


def test_another_text_is_said_once_and_a_complete_run_is_refused_then(home: Path, train) -> None:
    train("epochs=1")
    edit(home / "rates.py", "0.5", "0.25")
    with pytest.raises(ConfigError, match=r"name=train .*RATE = 0.25") as refused:
        train("epochs=1")
    assert "resume=never" in refused.value.fix
    assert "this run is complete" in train("epochs=1", "resume=changed")
    assert "since step 1: rates.py line 1: `RATE = 0.5` -> `RATE = 0.25`\n" in train("epochs=2")
    assert "ScriptChanged" in (home / "runs/train/events.jsonl").read_text()
    edit(home / "train.py", "import torch", "# with a comment\nimport torch")
    assert "since step" not in train("epochs=3")
    assert "this run is complete" in train("epochs=3")


def test_another_script_of_the_same_name_is_refused_and_a_moved_project_is_not(
    home: Path, train, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("epochs=1", "name=x", f"runs={home}/runs")
    (home / "other.py").write_text(TRAINING)
    with pytest.raises(ConfigError, match=r"script train.py -> other.py") as refused:
        train("epochs=2", "name=x", script="other.py")
    assert "resume=changed" in refused.value.fix
    assert "resumed after step 1" in train(
        "epochs=2", "name=x", "resume=changed", script="other.py"
    )
    moved = home / "elsewhere"
    moved.mkdir()
    for name in ("other.py", "rates.py"):
        (home / name).rename(moved / name)
    monkeypatch.syspath_prepend(str(moved))
    assert "resumed after step 2" in train("epochs=3", "name=x", script=str(moved / "other.py"))


def test_a_copy_is_the_script_that_the_launcher_names_and_other_files_are_not(home, monkeypatch):
    (home / ".git").mkdir()
    (home / "a").mkdir()
    origin, copy = home / "a" / "train.py", home / "runs" / "copy.py"
    copy.parent.mkdir()
    for file in (origin, copy):
        file.write_text("")
    told = script_at(origin)
    assert (told.name, told.place, told.project) == ("train", "/a/train.py", str(home))
    monkeypatch.setenv("PACELINE_SCRIPT", told.told_of(str(copy)))
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(copy), raising=False)
    assert (main_script().place, main_script().typed) == ("/a/train.py", "a/train.py")
    monkeypatch.setattr(main, "__file__", str(home / "train.py"))
    assert main_script().place == "/train.py"
    monkeypatch.delattr(main, "__file__")
    assert main_script() == MainScript("run")


def test_a_start_says_what_verify_has_shown_of_this_text_with_these_settings(home: Path) -> None:
    def shown(text: str, **settings: object) -> str:
        sources = Sources(script_at(home / "train.py"), {"train.py": text})
        facts = facts_of(sources, RunConfig(**settings), {"torch": "2.13"}, "cpu")
        save_facts(home / "record", facts, sources)
        return what_is_shown(facts, sources)

    assert shown("x = 1") == "not verified: paceline verify train.py"
    remember(home / "record", [1, 3])
    [file] = (home / "state" / "paceline").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for same in (shown("x = 1"), shown("x = 1  # one", name="y", epochs=3)):
        assert same.startswith("verified on 1, 3 ranks on ")
        assert "," not in same.partition("ranks")[2]
    assert shown("x = 1", precision="bf16", seed=2).endswith(", with seed=0, precision=fp32")
    assert shown("x = 2").startswith("changed since it was verified on ")
    file.write_text('[{"place": 3}, 7]')
    assert shown("x = 1") == "not verified: paceline verify train.py"
    os.truncate(file, 3)
    assert shown("x = 1") == "not verified: paceline verify train.py"
