"""Does `scripts/acceptance` know where it runs, and which of the processes of a launcher does the work?"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "acceptance"
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("acceptance", str(SCRIPT))
    spec = importlib.util.spec_from_loader("acceptance", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["acceptance"] = module
    loader.exec_module(module)
    return module


def test_it_knows_its_launcher(script: ModuleType) -> None:
    place = script.place_from
    assert place({}, 0, 0) == script.Place("none", 1, 0, 0, 2)
    assert place({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}, 4, 0)[:5] == (
        "slurm", 3, 0, 4, 4,
    )  # fmt: skip
    assert place(TORCHRUN, 4, 2) == script.Place("torchrun", 2, 1, 4, 2, "host0:29500")


def test_one_process_per_host_works_under_torchrun_and_one_in_all_under_srun(
    script: ModuleType,
) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert not script.is_extra({})
    assert script.is_extra(TORCHRUN | {"LOCAL_RANK": "1"})
    assert not script.is_extra(TORCHRUN | {"LOCAL_RANK": "0", "RANK": "4"} | step)
    assert script.is_extra(step | {"SLURM_PROCID": "2"})


def test_a_job_whose_gpus_torch_does_not_see_is_no_test_of_the_cpu(script: ModuleType) -> None:
    assert script.unseen_gpus({"SLURM_GPUS_ON_NODE": "4"}, 0) == "SLURM_GPUS_ON_NODE=4"
    assert not script.unseen_gpus({"SLURM_GPUS_ON_NODE": "4"}, 4)
    assert not script.unseen_gpus({"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_ID": "7"}, 0)


def test_ranks_use_nccl_only_with_a_gpu_each(script: ModuleType, tmp_path: Path) -> None:
    def backend(nodes: int, gpus: int, ranks: int) -> str:
        place = script.Place("none", nodes, 0, gpus, ranks)
        return str(script.Acceptance(place, tmp_path, "", quick=True).backend)

    assert [backend(1, 4, 4), backend(2, 1, 1), backend(1, 4, 2)] == ["nccl"] * 3
    assert [backend(1, 1, 2), backend(1, 0, 2), backend(1, 1, 1)] == ["gloo"] * 3


def test_every_launch_over_hosts_has_a_port_of_its_own(script: ModuleType, tmp_path: Path) -> None:
    tests = script.Acceptance(script.place_from(TORCHRUN, 0, 1), tmp_path, "", quick=True)
    assert tests._hosts() == ["--nodes", "2", "--node", "1", "--rendezvous", "host0:29501"]
    assert tests._hosts()[-1] == "host0:29502"
