"""Does every example train the same bits on one rank as on two of which one is killed and three that resume?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.example_trainings import check_same_bits
from support.program import paceline as run_paceline

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))
OFTEN = {"distillation"}  # tests of train/ have the features of the others, one by one
NEEDS = {"causal_lm": "transformers", "lora": "peft", "padded_text": "transformers"}


@pytest.mark.parametrize(
    "example",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.heavy) for name in EXAMPLES],
)
def test_the_same_bits_on_any_number_of_ranks_and_through_a_killed_rank(example, tmp_path):
    package = NEEDS.get(example, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    _, digests, _ = check_same_bits(FOLDER / f"{example}.py", tmp_path)
    if example == "lora":
        assert all("lora_" in name for name in digests)
    if example == "distillation":
        assert not any("teacher" in name for name in digests)


def test_an_example_runs_with_the_launcher(tmp_path: Path) -> None:
    words = ("steps=3", "batch.global_size=16")
    done = run_paceline("run", "-n", "2", str(FOLDER / "stream.py"), *words, folder=tmp_path)
    assert (done.code, "done: 3 steps" in done.out) == (0, True), done


def test_the_examples_are_short_and_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    for example in EXAMPLES:
        text = (FOLDER / f"{example}.py").read_text(encoding="utf-8")
        assert text.count("\n") < 60, example
        assert "os.environ" not in text, example
        assert table.count(f"[{example}.py]({example}.py)") == 1, example
