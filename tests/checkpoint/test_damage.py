"""Short runs of `scripts/damage.py` and `scripts/hostile_folders.py`: no bad bytes, nothing lost, nothing without a word."""

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
    assert list(folder.glob("damage-*")) + list(folder.glob("hostile-*")) == []
    return done


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[str, dict[str, int]]:
    """What became of 30 trials, by case."""
    folder = tmp_path_factory.mktemp("trials")
    done = run(folder, str(SCRIPT), "--count", "30", "--seed", "7", "--json")
    assert done.stderr.startswith("full disk: left out") or not done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", [*ANYWHERE, pytest.param("full disk", marks=pytest.mark.root)])
def test_only_good_bytes_are_loaded_and_nothing_is_lost_without_a_word(case, figures) -> None:
    found = figures[case]
    assert found["count"] >= 5
    assert found["bad_bytes"] == found["lost"] == found["silent"] == 0
    assert found["newer"] + found["older"] == found["count"]


@pytest.mark.heavy
def test_the_trials_would_notice_if_sums_were_not_checked(tmp_path) -> None:
    words = ("--count", "8", "--only", "flipped bit", "--json")
    done = run(tmp_path, "-c", WITHOUT_SUMS, str(SCRIPT), *words)
    assert done.returncode == 1
    assert json.loads(done.stdout)["flipped bit"]["bad_bytes"] > 0


@pytest.mark.slow
def test_damaged_and_forged_run_folders_are_refused_or_skipped(tmp_path: Path) -> None:
    script = SCRIPT.with_name("hostile_folders.py")
    done = run(tmp_path, str(script), "--count", "34", "--seed", "7", "--json")
    assert done.returncode in {0, 1}, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 17
    assert [one["examples"] for one in found.values() if one["examples"]] == []
    assert done.returncode == 0
