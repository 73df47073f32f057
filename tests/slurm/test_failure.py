"""Does a job whose rank was killed leave a page that says which one, how, and from where to go on?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.submitting import Desk

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "trials" / "faulty_training.py"
WORDS = ("batch.global_size=32", "epochs=1", "checkpoint.every=5steps", "timeout.step_s=60")
_PATIENCE_S = 240


@pytest.mark.slurm(nodes=4, cpus=2, gpus=0, cgroup=True)
def test_a_killed_rank_and_one_out_of_memory_leave_a_page(slurm) -> None:
    desk = Desk.on(slurm, 'requeue = false\noptions = ["--mem=900M", "--exclusive"]')
    shutil.copy(SCRIPT, desk.folder)
    where = ("--nodes", "2", "--ranks-per-node", "1", "--time", "5")
    ends = {
        "kill": "was killed (SIGKILL)",
        "memory": "was killed: it used more memory than the job requested",
    }
    env = {"FAULT_RANK": "1", "FAULT_STEP": "12"}
    jobs = {}
    for fault in ends:
        saved = desk.folder / "runs" / fault / "checkpoints" / "step-000000010"
        how = env | {"FAULT": fault, "FAULT_AFTER": str(saved)}
        jobs[fault] = desk.submit(*where, "faulty_training.py", *WORDS, f"name={fault}", env=how)
    for fault, job in jobs.items():
        slurm.wait(job, timeout_s=_PATIENCE_S)
        folder = desk.folder / "runs" / fault
        assert (folder / "failure.json").exists(), desk.log(fault, job)
        page = json.loads((folder / "failure.json").read_text())
        assert (page["rank"], page["how"]) == (1, ends[fault]), (page, desk.log(fault, job))
        assert (page["step"], page["checkpoint_step"], page["slurm"]) == (12, 10, "")
        later = json.loads(desk.paceline("hang", "--json", str(folder)).out)["failure"]
        assert later["slurm"].startswith(f"job {job} is "), later
        assert later["how"] == page["how"]
