"""Do scripts that were written for Accelerate come over with few lines, and train the same bits on any number of ranks?"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.changed_lines import changed_lines
from support.example_trainings import check_same_bits

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "from_accelerate"
NAMES = sorted(path.name.removesuffix("_before.py") for path in FOLDER.glob("*_before.py"))
GUIDE = ROOT / "docs" / "guides" / "from-accelerate.md"


@pytest.mark.parametrize(
    "name",
    [name if name == "gan" else pytest.param(name, marks=pytest.mark.heavy) for name in NAMES],
)
def test_a_converted_script_has_the_same_bits_on_any_number_of_ranks(name, tmp_path):
    script = FOLDER / f"{name}_after.py"
    if "transformers" in script.read_text() and not importlib.util.find_spec("transformers"):
        pytest.skip("transformers is not installed")
    check_same_bits(script, tmp_path)


def test_the_guide_counts_the_lines_right() -> None:
    assert len(NAMES) == 5
    for name in NAMES:
        before, after = ((FOLDER / f"{name}_{form}.py").read_text() for form in ("before", "after"))
        row = re.search(rf"^\|.*/{name}_after\.py.*$", GUIDE.read_text(), re.MULTILINE)
        assert row is not None, name
        removed, added = changed_lines(before, after)
        assert row[0].split("|")[-3:-1] == [f" {removed} ", f" {added} "]
        assert added <= 16
        assert after.count("\n") < before.count("\n")


@pytest.mark.heavy  # scripts of another library
@pytest.mark.parametrize("name", NAMES)
def test_the_script_before_runs(name: str, tmp_path: Path) -> None:
    if not importlib.util.find_spec("accelerate"):
        pytest.skip("accelerate is not installed; the guide records the results")
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "src")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(FOLDER / f"{name}_before.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "epoch 4: " in done.stdout
