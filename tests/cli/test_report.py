"""Does `paceline report` write its page where it says, privately, and print the same facts as JSON?"""

from __future__ import annotations

import json
from pathlib import Path

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


def test_what_is_not_there_or_cannot_be_written_is_refused(tmp_path: Path) -> None:
    runs.make_run(tmp_path / "runs" / "run")
    (tmp_path / "run.txt").write_text("in the way")
    for code, words, parts in (
        (2, ["rnu"], ["'rnu'", "did you mean run?"]),
        (3, ["run", "--to", "run.txt/x.html"], ["run.txt/x.html", "--to"]),
    ):
        done = paceline("report", *words, folder=tmp_path)
        assert (done.code, done.out) == (code, "")
        assert [part for part in parts if part not in done.err] == []
