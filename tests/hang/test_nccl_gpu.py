"""On a GPU: a run over NCCL that is stuck names the rank and the cause, and ends in time, without a native abort."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.program import around, paceline

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "trials" / "faulty_training.py"
WORDS = (
    "--max-restarts", "0", "batch.global_size=32", "epochs=1", "checkpoint.every=5steps", "timeout.step_s=15",
    "backend=nccl", "device=cuda",
)  # fmt: skip
NATIVE = ("terminate called", "C++ CapturedTraceback", "frame #0", "ProcessGroupNCCL")
CAUSES = {
    "loop": "own code",
    "stop": "stopped",
    "raise": "exception",
    "kill": "",
    "collective": "another collective",
    "shape": "another shape",
    "barrier": "another collective",
    "kernel": "",
}


@pytest.mark.parametrize("fault", CAUSES)
def test_a_stuck_run_over_nccl_ends_with_a_verdict(fault: str, tmp_path: Path) -> None:
    env = {"FAULT": fault, "FAULT_RANK": "1", "FAULT_STEP": "12"}
    done = paceline("run", "-n", "2", *around(str(SCRIPT), WORDS), folder=tmp_path, env=env)
    print(done.out[-3000:], done.err)
    assert done.code == (137 if fault == "kill" else 1)
    assert not [text for text in NATIVE if text in done.out + done.err]
    assert "rank 1" in done.err
    folder = tmp_path / "runs" / "faulty_training"
    if CAUSES[fault]:
        shown = json.loads(paceline("hang", str(folder), "--json", folder=tmp_path).out)
        assert (shown["cause"], shown["ranks"]) == (CAUSES[fault], [1])
