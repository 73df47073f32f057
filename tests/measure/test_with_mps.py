"""Does `scripts/with_mps` pass exit codes on, and do GPU tests fail where torch does not see the GPU?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "with_mps"


def command(folder: Path, name: str, text: str) -> str:
    """Write a program into a folder, and return a PATH that begins with it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o700)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.skipif(
    shutil.which("nvidia-cuda-mps-control") is not None, reason="this machine has CUDA MPS"
)
def test_without_mps_a_command_runs_as_it_is(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo ${CUDA_MPS_PIPE_DIRECTORY-none}; exit 3"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([SCRIPT, *words], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "none\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_server_that_does_not_end_hides_no_exit_code(tmp_path: Path, code: int) -> None:
    path = command(tmp_path / "bin", "nvidia-cuda-mps-control", 'test "$1" = -d')
    env = os.environ | {"TMPDIR": str(tmp_path), "PATH": path}
    done = subprocess.run([SCRIPT, "sh", "-c", f"exit {code}"], env=env, check=False)
    assert done.returncode == code


@pytest.mark.heavy
def test_gpu_tests_fail_where_torch_does_not_see_the_gpu(tmp_path: Path) -> None:
    path = command(tmp_path / "bin", "nvidia-smi", 'echo "GPU 0: a card (UUID: GPU-1)"')
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PATH": path}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run(
        [*words, str(Path(__file__))], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "nvidia-smi lists 1 GPU and torch" in done.stderr
