"""A short run of the trials of `scripts/damage.py`: no bad bytes, nothing lost, nothing without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "damage.py"
ANYWHERE = [
    "flipped bit",
    "truncated file",
    "missing file",
    "two writers at once",
    "killed while saving",
]

WITHOUT_SUMS = """
import runpy, sys
import paceline.checkpoint.storage as storage

def unsummed(where, step, name, facts, cached=True):
    yield from where.chunks(step, name)

storage._verified = unsummed
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stderr.startswith("full disk: left out") or not done.stderr, done.stderr
    assert list(folder.glob("damage-*")) == []
    return done


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[str, dict[str, int]]:
    """What became of 30 trials, by case."""
    done = run(
        tmp_path_factory.mktemp("trials"), str(SCRIPT), "--count", "30", "--seed", "7", "--json"
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", [*ANYWHERE, pytest.param("full disk", marks=pytest.mark.root)])
def test_only_good_bytes_are_loaded_and_the_last_good_ones_are_never_lost(case, figures) -> None:
    found = figures[case]
    assert found["count"] >= 5
    assert found["bad_bytes"] == found["lost"] == 0
    assert found["newer"] + found["older"] == found["count"]


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in ANYWHERE if case != "missing file"),
        "missing file",
        pytest.param("full disk", marks=pytest.mark.root),
    ],
)
def test_nothing_happens_without_a_word(case, figures) -> None:
    assert figures[case]["silent"] == 0


def test_the_trials_would_notice_if_sums_were_not_checked(tmp_path) -> None:
    done = run(
        tmp_path, "-c", WITHOUT_SUMS, str(SCRIPT), "--count", "8", "--only", "flipped bit", "--json"
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["flipped bit"]["bad_bytes"] > 0
