"""`paceline verify` confirms equal bits at every world size and through a resume, and finds the mistake otherwise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.program import around, paceline

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from broken_scripts.first_forty import BROKEN
from broken_scripts.template import SETTINGS, Broken

GOOD = Path(__file__).with_name("good")
IN_BODY = Broken("noise drawn in the body of the loop", "loss", "order", {
    "step": "noise = iter([torch.randn(lane[0].shape) for lane in step.lanes])",
    "inputs": "x = x + next(noise)",
})  # fmt: skip
heavy = pytest.mark.heavy


@pytest.mark.parametrize(
    "name",
    [
        "a buffer changed on one rank",
        pytest.param("an unseeded random.Random", marks=heavy),
        pytest.param(IN_BODY.name, marks=heavy),
    ],
)
def test_a_mistake_is_found_and_its_cause_is_right(tmp_path: Path, name: str) -> None:
    """Try one of the forty scripts of `scripts/verify_causes.py`; the tables of test_causes.py have every cause."""
    [broken] = [script for script in [*BROKEN, IN_BODY] if script.name == name]
    script = tmp_path / "script.py"
    script.write_text(broken.text, encoding="utf-8")
    found = verdict_on(script, "--worlds", "1,2", *SETTINGS, folder=tmp_path, code=1)
    cause = found["difference"]["cause"]
    assert (cause["where"], cause["why"]) == (broken.where, broken.why), cause
    assert cause["known"]
    assert cause["shown_by"]
    assert ("the body of the loop" in cause["fix"]) == (broken is IN_BODY)


def verdict_on(script: Path, *words: str, folder: Path, code: int) -> dict[str, Any]:
    """Run verify and return its JSON."""
    done = paceline("verify", "--json", *around(str(script), words), folder=folder)
    assert (done.code, done.err) == (code, ""), done
    found: dict[str, Any] = json.loads(done.out)
    assert (found["script"], found["same"]) == (script.name, code == 0)
    assert not (folder / "runs").exists()
    return found


TAUGHT = Broken("", "", "", {
    "before": "rates, accuracies = [1.0], {}",
    "loss": "value = value * rates[-1]",
    "sample": "{sample}",
    "steps": "epochs=3",
    "after": "if step.ends_epoch:\n    {after}\n    accuracies[step.epoch] = 1.0",
})  # fmt: skip
"""A training in which something happens at the end of each of its three epochs, which are longer than verify's."""
WHOLE_EPOCHS = "\n    assert len(accuracies) == 3, 'the code after the loop'\n"


@pytest.mark.parametrize(
    ("sample", "after", "cause"),
    [
        pytest.param("pass", "pass", None, marks=heavy),
        ("pass", "rates.append(0.9 * rates[-1])", ("resume", "unsaved")),
        pytest.param("x = x + (torch.utils.data.get_worker_info() is not None)", "pass", ("samples", "workers"), marks=heavy),
    ],
)  # fmt: skip
def test_a_resume_crosses_the_end_of_an_epoch_and_has_data_workers(
    tmp_path: Path, sample: str, after: str, cause: tuple[str, str] | None
) -> None:
    text = TAUGHT.text.replace("{sample}", sample).replace("{after}", after)
    text = text.replace("\n\nif __name__", f"{WHOLE_EPOCHS}\n\nif __name__")
    (script := tmp_path / "script.py").write_text(text, encoding="utf-8")
    found = verdict_on(script, "--worlds", "1,2", *SETTINGS, folder=tmp_path, code=int(bool(cause)))
    assert (found["epoch_steps"], found["steps"], found["resumed_after"]) == (4, 9, 6)
    if cause is None:
        assert found["workers"] == 2
    else:
        difference = found["difference"]
        assert (difference["cause"]["where"], difference["cause"]["why"]) == cause
        assert difference["step"] <= 9


@pytest.mark.parametrize(
    ("script", "words", "steps", "resumed_after"),
    [
        ("trained.py", ["batch.global_size=30", "batch.lanes=3"], 9, 6),
        pytest.param("own_loop.py", ["--steps", "3", "batch.global_size=16"], 3, 1, marks=heavy),
    ],
)
def test_a_right_script_has_the_same_bits_in_every_world_and_through_a_resume(
    tmp_path: Path, script: str, words: list[str], steps: int, resumed_after: int
) -> None:
    found = verdict_on(GOOD / script, "--worlds", "1,3", *words, folder=tmp_path, code=0)
    assert (found["worlds"], found["steps"]) == ([1, 3], steps)
    assert found["resumed_after"] == resumed_after
    assert len(set(found["digests"].values())) == 1
    assert (found["difference"], found["tolerance"]) == (None, 0.0)


@heavy
def test_a_mistake_smaller_than_the_rounding_of_compression_is_found(tmp_path: Path) -> None:
    text = (GOOD / "trained.py").read_text(encoding="utf-8")
    wrong = "cross_entropy(*a) * (1 + 0.002 * int(os.environ['WORLD_SIZE']))"
    text = text.replace("data, cross_entropy)", f"data, lambda *a: {wrong})")
    (script := tmp_path / "script.py").write_text(f"import os\n{text}", encoding="utf-8")
    words = ["--steps", "2", "batch.global_size=30", "exact=false", "compression=bf16"]
    found = verdict_on(script, "--worlds", "1,2", *words, folder=tmp_path, code=1)["difference"]
    assert found["step"] == 1
    assert found["tensor"].startswith("the loss of lane 0")


@pytest.mark.parametrize(
    ("script", "code", "problem"),
    [
        ("print('trained, trust me')\n", 1, "script.py left no record"),
        ("raise ValueError('unwell')\n", 1, "script.py failed on 1 rank"),
        ("import paceline\npaceline.config_from_argv()\n", 2, "'sed'"),
    ],
)
def test_a_script_that_cannot_be_compared_is_told_what_to_do(
    tmp_path: Path, script: str, code: int, problem: str
) -> None:
    (tmp_path / "script.py").write_text(script)
    done = paceline("verify", "--worlds", "1,2", "script.py", "sed=3", folder=tmp_path)
    assert (done.code, done.out) == (code, "")
    assert problem in done.err
    assert "\n  fix: " in done.err
