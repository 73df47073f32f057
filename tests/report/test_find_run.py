"""Is the run found that a person means?"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.registry import register
from paceline.errors import ConfigError
from paceline.report.find_run import find_run
from support.run_folders import make_run, submission


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def test_by_name_folder_job_and_name_from_elsewhere(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "here")
    make_run(tmp_path / "far" / "away")
    for job in ("17", "18"):
        register(submission(job, tmp_path / "far" / "away"))
    register(submission("19", tmp_path / "runs" / "here"))
    for word in ("here", "runs/here", "./runs/here", str(tmp_path / "runs/here"), "19", "19_3"):
        found = find_run(word, Path("runs"))
        assert (found.name, [job.job for job in found.jobs]) == ("here", ["19"])
    for word in ("away", "17", "18", "far/away"):
        found = find_run(word, Path("runs"))
        assert found.folder.root.resolve() == tmp_path / "far/away"
        assert [job.job for job in found.jobs] == ["17", "18"]
    assert find_run("away", Path("far")).name == "away"


def test_a_submitted_run_that_has_no_files_yet_is_found(tmp_path: Path) -> None:
    register(submission("17", tmp_path / "runs" / "new"))
    assert find_run("17", Path("runs")).name == find_run("new", Path("runs")).name == "new"


def test_the_newest_job_of_an_id_that_was_given_twice(tmp_path: Path) -> None:
    register(submission("17", tmp_path / "runs" / "old"))
    register(submission("17", tmp_path / "runs" / "new"))
    assert find_run("17", Path("runs")).name == "new"


def test_what_is_not_known_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'x'"):
        find_run("x", Path("runs"))
    make_run(tmp_path / "runs" / "digits")
    register(submission("4711", tmp_path / "elsewhere" / "letters"))
    for word, known in (("digist", "digits"), ("4712", "4711"), ("qqq", "4711, digits, letters")):
        with pytest.raises(ConfigError, match=known):
            find_run(word, Path("runs"))


def test_a_name_that_two_runs_have_is_refused(tmp_path: Path) -> None:
    register(submission("17", tmp_path / "a" / "same"))
    register(submission("18", tmp_path / "b" / "same"))
    with pytest.raises(ConfigError, match=r"2 runs.* same\n.*b/same, .*a/same"):
        find_run("same", Path("runs"))
