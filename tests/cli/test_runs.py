"""A run says what it does, and its config.toml starts the same run again, on any number of ranks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from paceline.report.find_run import find_run
from paceline.report.state import RunWatcher
from support.program import Done, paceline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def first(folder: Path) -> Done:
    """A short run with settings of its own: bare words, key=value and a flag."""
    words = ["1", "name=first \u2603", "seed=7", "steps=12", "lr.base=0.02", "--batch.lanes", "3"]
    return paceline("train", "toy", *words, folder=folder)


def digest(done: Done) -> str:
    """Return the digest in the last line of a run."""
    assert (done.code, done.err) == (0, "")
    found = re.fullmatch(
        r"(?:\[0\] )?done: 12 steps in [\d.]+ s; weights and optimizer state ([0-9a-f]{16})",
        done.out.splitlines()[-1],
    )
    assert found
    return found[1]


def test_the_settings_of_a_run_are_written_down(folder: Path, first: Done) -> None:
    digest(first)
    with (folder / "runs" / "first \u2603" / "config.toml").open("rb") as file:
        written = tomllib.load(file)
    found = [written[key] for key in ("name", "seed", "steps", "epochs")]
    assert found == ["first \u2603", 7, 12, 1]
    assert (written["lr"]["base"], written["batch"]) == (0.02, {"global_size": 32, "lanes": 3})


def test_a_refused_command_leaves_a_finished_run_as_it_was(folder: Path, first: Done) -> None:
    run = folder / "runs" / "first \u2603"
    before = contents(run)
    done = paceline("train", "toy", "1", f"name={run.name}", "seed=8", "steps=12", folder=folder)
    assert done.code == 2
    assert done.err.rstrip().splitlines()[-1].startswith("  fix: give this run another name=")
    assert contents(run) == before
    assert RunWatcher(find_run(str(run), folder)).look().phase == "ended"


def contents(run: Path) -> dict[str, bytes]:
    """Return the files of a run, but for its lock, which names the last process that held it."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.parametrize(("ranks", "name"), [("1", "again"), ("2", "on two ranks")])
def test_its_config_file_starts_the_same_run_again(
    folder: Path, first: Done, ranks: str, name: str
) -> None:
    file = "runs/first \u2603/config.toml"
    words = ("toy", "-n", ranks, "--config", file, f"name={name}")
    again = paceline("train", *words, folder=folder)
    assert digest(again) == digest(first)
    assert (folder / "runs" / name / "config.toml").is_file()
