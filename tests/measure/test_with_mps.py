"""Does `scripts/with_mps` run a command, and pass its exit code on, where there is no CUDA MPS?"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "with_mps"


@pytest.mark.skipif(
    shutil.which("nvidia-cuda-mps-control") is not None, reason="this machine has CUDA MPS"
)
def test_without_mps_a_command_runs_as_it_is(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo ${CUDA_MPS_PIPE_DIRECTORY-none}; exit 3"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([SCRIPT, *words], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "none\n", "")
    assert list(tmp_path.iterdir()) == []
