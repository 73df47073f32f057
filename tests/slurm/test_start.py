"""Does srun start the same training, bit for bit, as one process alone?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = (sys.executable, "-m", "paceline.recipes.toy", "steps=20")


def digest(text: str) -> str:
    found = re.search(r"weights and optimizer state (\w{16})", text)
    assert found, text
    return found[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one process alone."""
    folder = tmp_path_factory.mktemp("alone")
    return digest(
        subprocess.run(TRAINING, cwd=folder, capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.heavy  # the README's line, and the jobs of test_submit.py, start the same way
@pytest.mark.slurm(nodes=2, cpus=2, gpus=0)
@pytest.mark.parametrize(
    ("slurm", "nodes", "ranks"), [({}, 1, 2), ({"cgroup": True}, 2, 4)], indirect=["slurm"]
)
def test_srun_starts_the_same_training(slurm, nodes: int, ranks: int, alone: str, tmp_path: Path):
    done = slurm.run(
        ["srun", f"-N{nodes}", f"-n{ranks}", *TRAINING], folder=tmp_path, timeout_s=120
    )
    assert done.code == 0, done.err
    assert f"{ranks} ranks" in done.out
    assert "started by slurm" in done.out
    assert digest(done.out) == alone
