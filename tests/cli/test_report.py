"""Does `paceline report` write its page where it says, privately, and print the same facts as JSON?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import run_verb
from support import report_trainings as trainings
from support import run_folders as runs
from support.program import paceline


def test_a_page_is_written_beside_the_run_and_json_writes_nothing(tmp_path: Path) -> None:
    one = trainings.make_training(tmp_path / "runs" / "one", "name=one")
    trainings.make_training(tmp_path / "runs" / "two", "name=two", seed=2)
    done = paceline("report", "one", "--json", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert [run["name"] for run in facts["runs"]] == ["one"]
    assert not one.report.exists()
    done = paceline("report", "runs/one", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("runs/one/report.html (")
    assert one.report.stat().st_mode & 0o077 == 0
    both = paceline("report", "one", "two", "one", folder=tmp_path)
    assert both.out.startswith("runs/report.html (")
    page = (tmp_path / "runs" / "report.html").read_text()
    assert page.count('class="card"') == 2


@pytest.mark.parametrize(
    ("words", "problem", "fix", "code"),
    [
        (["--runs", "none"], "there are no runs in ", "start one with `paceline train mnist`", 2),
        (["--open", "--json"], "--open and --json exclude each other", "give one of them", 2),
        (["rnu"], "there is no run or job 'rnu'", "did you mean run?", 2),
        (["run", "--jsno"], "there is no option --jsno", "did you mean --json?", 2),
        (
            ["run", "--to", "run.txt/x.html"],
            "cannot write run.txt/x.html",
            "name another file with --to",
            3,
        ),
    ],
)
def test_bad_usage_is_refused(
    tmp_path: Path, monkeypatch, capsys, words: list[str], problem: str, fix: str, code: int
) -> None:
    runs.make_run(tmp_path / "runs" / "run")
    (tmp_path / "run.txt").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    assert run_verb(["report", *words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert problem in said.err
    assert fix in said.err
