"""Scripts that do not know Paceline, as tasks of srun: emulated by its variables on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.world.detect import detect_world
from paceline.world.torch_variables import torch_variables

TASK = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
}  # fmt: skip
ON_TWO_NODES = TASK | {
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item())
dist.destroy_process_group()
"""


def test_the_address_for_foreign_scripts_does_not_change_where_paceline_joins() -> None:
    world = detect_world(ON_TWO_NODES)
    given = torch_variables(world, ON_TWO_NODES)
    assert (given["MASTER_ADDR"], given["RANK"], given["LOCAL_RANK"]) == ("n1", "1", "0")
    assert detect_world(ON_TWO_NODES | given) == world


def test_all_tasks_of_a_step_derive_the_same_port_and_another_start_another() -> None:
    starts = ({}, {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}, {"SLURM_RESTART_COUNT": "1"})
    envs = [ON_TWO_NODES | start for start in starts]
    ports = [torch_variables(detect_world(env), env)["MASTER_PORT"] for env in envs]
    assert ports[0] == ports[1] != ports[2]


def test_a_task_becomes_another_interpreter_with_the_variables_of_torchrun(tmp_path: Path) -> None:
    text = "import os, sys\nprint('paceline' in sys.modules, os.environ['RANK'], *sys.argv)"
    (tmp_path / "any.py").write_text(text)
    command = [sys.executable, "-m", "paceline.launch.rank_srun", "python", sys.executable]
    env = os.environ | TASK | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    said = subprocess.check_output([*command, "any.py", "-x"], cwd=tmp_path, env=env, text=True)
    assert said == "False 1 any.py -x\n"


@pytest.mark.slow
def test_two_tasks_with_their_own_init_process_group_join(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(ALL_REDUCE)
    command = [sys.executable, "-m", "paceline.launch.rank_srun", "path", "any.py"]
    env = os.environ | TASK | {"SLURM_JOB_ID": str(os.getpid()), "GLOO_SOCKET_IFNAME": "lo"}
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    own = [env | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    tasks = [subprocess.Popen(command, env=each, **how) for each in own]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert all("sum 3.0" in text for text in said)
