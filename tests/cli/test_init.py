"""`paceline init`: what it writes trains as it is, with the same bits on one and two ranks, and nothing is overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.init import script_text
from paceline.cli.init_origins import ORIGINS
from paceline.cli.main import run_verb
from support.program import paceline

ROOT = Path(__file__).resolve().parents[2]


def digest_of(output: str) -> str:
    return re.findall(r"weights and optimizer state ([0-9a-f]{16})", output)[-1]


def test_the_script_has_the_same_bits_alone_and_on_two_ranks(tmp_path: Path) -> None:
    done = paceline("init", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("wrote train.py\n")
    command = [sys.executable, "train.py", "steps=5", "name=alone"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    alone = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    both = paceline("run", "-n", "2", "train.py", "steps=5", folder=tmp_path)
    assert both.code == 0, both.err
    assert digest_of(alone.stdout) == digest_of(both.out)
    assert (tmp_path / "runs" / "train" / "events.jsonl").exists()  # named after the file


def test_the_commands_that_it_prints_are_those_of_the_file(tmp_path: Path) -> None:
    done = paceline("init", "my digits", folder=tmp_path)
    assert (tmp_path / "my digits" / "train.py").is_file()
    assert "python 'my digits/train.py' steps=5\n" in done.out
    assert "paceline run -n 2 'my digits/train.py'\n" in done.out
    assert "paceline verify 'my digits/train.py'\n" in done.out


@pytest.mark.parametrize("name", ORIGINS)
def test_a_script_of_another_library_finds_its_calls_in_the_table_and_at_the_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    origin = ORIGINS[name]
    done = paceline("init", "--from", name, folder=tmp_path)
    assert done.code == 0
    shown = " ".join(done.out.split())
    assert f"in {origin.name} you write here you write" in shown
    for each in origin.replacements:
        assert f"{each.there} {each.here}" in shown
    assert f"guide: {origin.guide}\n" in done.out
    assert run_verb(origin.guide.split()[1:]) == 0  # prints the guide
    assert capsys.readouterr().out.startswith("# Move from ")
    written = (tmp_path / "train.py").read_text()
    marks = re.findall(rf"^# (\d)\. .*\n#    In {origin.name}: .*\. Here: .*\.\ndef ", written, re.MULTILINE)  # fmt: skip
    assert marks == ["1", "2", "3"]
    without = [line for line in written.splitlines() if not line.startswith("#    In ")]
    assert "\n".join(without) + "\n" == script_text("train")


def test_a_script_of_another_library_is_shown_with_what_replaces_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "from accelerate import Accelerator\n\naccelerator = Accelerator()\ntrain, test = random_split(data, [0.9, 0.1])\n"
    Path("mine.py").write_text(script + "args = parser.parse_args()\nscheduler = OneCycleLR(optimizer)\n")  # fmt: skip
    assert run_verb(["init", "--from", "accelerate", "mine.py"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in shown if words and words[0].isdigit()] == ["3", "4", "5", "6"]
    assert Path("mine.py").read_text().startswith(script)


def test_an_existing_file_stays_unless_force_is_given(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine\n")
    done = paceline("init", folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "train.py exists" in done.err
    assert "paceline init --force train.py" in done.err
    assert (tmp_path / "train.py").read_text() == "mine\n"
    done = paceline("init", "--force", folder=tmp_path)
    assert (done.code, done.out.splitlines()[0]) == (0, "overwrote train.py")
    assert (tmp_path / "train.py").read_text() == script_text("train")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = paceline("init", "file", folder=tmp_path)
    assert (done.code, done.out) == (3, "")
    assert "file/train.py" in done.err
