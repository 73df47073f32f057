"""`paceline verify` confirms equal bits at every world size, and names the mistake otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.verify.compare_worlds import TOLERANCE
from paceline.verify.verdict import CAUSES
from support.program import around, paceline

BROKEN = Path(__file__).with_name("broken")
GOOD = Path(__file__).with_name("good")


def verdict_on(script: Path, *words: str, folder: Path, code: int) -> dict[str, Any]:
    """Run verify and return its JSON."""
    done = paceline("verify", "--steps", "3", "--json", *around(str(script), words), folder=folder)
    assert (done.code, done.err) == (code, ""), done
    found: dict[str, Any] = json.loads(done.out)
    assert (found["script"], found["same"], found["steps"]) == (script.name, code == 0, 3)
    assert not (folder / "runs").exists()
    return found


LOSS, RANKS = "the loss", "the weights of different ranks"
FIRST_ROUNDED = r"the loss|model\.\d\.(weight|bias)|optimizer\..+"
"""Which of them rounding shows in first depends on the CPU's vector width."""


@pytest.mark.parametrize(
    ("script", "cause", "step", "tensor"),
    [
        ("unseeded.py", "unseeded", 1, LOSS),
        ("first_weights.py", "first_weights", 0, RANKS),
        ("rank_order.py", "data_order", 1, LOSS),
        ("no_average.py", "ranks_diverge", 1, RANKS),
        ("batchnorm.py", "batchnorm", 1, LOSS),
        ("rank_seed.py", "randomness", 1, LOSS),
        ("mean_of_means.py", "mean_of_means", 1, LOSS),
        ("summation.py", "summation", 1, FIRST_ROUNDED),
    ],
)
def test_a_mistake_is_named_with_the_first_step_and_tensor_it_shows_in(
    tmp_path: Path, script: str, cause: str, step: int, tensor: str
) -> None:
    found = verdict_on(BROKEN / script, "--worlds", "1,2", folder=tmp_path, code=1)
    difference = found["difference"]
    assert (difference["cause"], difference["world"], difference["step"]) == (cause, 2, step)
    assert re.fullmatch(tensor, difference["tensor"])
    assert (difference["likely_cause"], difference["fix"]) == CAUSES[cause]
    assert difference["largest"] > 0


def test_every_broken_script_says_which_mistake_it_is() -> None:
    for script in BROKEN.glob("*.py"):
        assert script.read_text().startswith('"""The mistake'), script.name


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("trained.py", ["batch.global_size=30", "batch.lanes=3"]),
        ("own_loop.py", ["batch.global_size=16"]),
    ],
)
def test_a_right_script_has_the_same_bits_in_every_world(
    tmp_path: Path, script: str, words: list[str]
) -> None:
    found = verdict_on(GOOD / script, "--worlds", "1,2,3", *words, folder=tmp_path, code=0)
    assert found["worlds"] == [1, 2, 3]
    assert len(set(found["digests"].values())) == 1
    assert (found["difference"], found["tolerance"]) == (None, 0.0)


def test_a_free_order_of_summation_stays_within_the_tolerance_it_states(tmp_path: Path) -> None:
    words = ["batch.global_size=30", "exact=false"]
    found = verdict_on(GOOD / "trained.py", "--worlds", "1,2", *words, folder=tmp_path, code=0)
    assert found["tolerance"] == TOLERANCE
    assert 0 < found["largest_relative"] <= TOLERANCE
    assert len(set(found["digests"].values())) == 2


@pytest.mark.parametrize(
    ("script", "code", "problem", "fix"),
    [
        ("print('trained, trust me')\n", 1, "script.py left no record of its steps", "train inside `with paceline.Run(config) as run`"),
        ("raise ValueError('unwell')\n", 1, "script.py failed on 1 rank:", "make it run with `paceline run` first"),
        ("import paceline\npaceline.config_from_argv()\n", 2, "there is no setting 'sed'", "make it run with `paceline run` first"),
    ],
)  # fmt: skip
def test_a_script_that_cannot_be_compared_is_told_what_to_do(
    tmp_path: Path, script: str, code: int, problem: str, fix: str
) -> None:
    (tmp_path / "script.py").write_text(script)
    done = paceline("verify", "--worlds", "1,2", "script.py", "sed=3", folder=tmp_path)
    assert (done.code, done.out) == (code, "")
    assert problem in done.err
    assert f"\n  fix: {fix}" in done.err
