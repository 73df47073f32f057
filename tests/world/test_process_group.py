"""Ranks meet without opening a port to the world, wait as long as they should, and leave without a word."""

import contextlib
import os
import subprocess
import sys
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline import handover
from paceline.config import BatchConfig, RunConfig
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.world.address import free_port, listen_at
from paceline.world.collectives import all_gather_rows, sum_across
from paceline.world.device import gpu_index
from paceline.world.process_group import join, shorten_timeout
from paceline.world.rendezvous import claim_folder
from paceline.world.world import World
from support.processes import on_processes, run_on_processes
from support.program import wait_for


def open_listeners() -> list[str]:
    """The local addresses on which this very process listens."""
    mine = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.append(words[1].partition(":")[0])
    return found


LOOPBACK = "0100007F"


def freed_after_leaving() -> bool:
    """Leave a group of which nobody but torch knows; return whether it was freed."""
    with join(RunConfig()):
        group = weakref.ref(dist.group.WORLD)
    return group() is None


def test_a_group_that_was_left_is_not_freed_for_its_threads_may_want_pythons_lock(tmp_path) -> None:
    assert run_on_processes(freed_after_leaving, 2, tmp_path, {}) == [False, False]


@on_processes(2)
def test_one_node_listens_on_loopback_only(world: World) -> None:
    assert set(open_listeners()) == {LOOPBACK}


@on_processes(3)
def test_collectives_reach_all(world: World) -> None:
    assert sum_across(world, torch.tensor([world.rank, 1])).tolist() == [3, 3]
    assert all_gather_rows(world, torch.tensor([[world.rank]])).tolist() == [[[0]], [[1]], [[2]]]


def wait_for_a_late_rank(config: RunConfig) -> float:
    """Return how long rank 0 waited; leaving together is no longer possible then."""
    waited = 0.0
    with contextlib.suppress(RuntimeError), join(config) as world:
        shorten_timeout(world, config)
        begun = time.monotonic()
        if world.rank == 1:
            wait_for(Path("gave-up"))
        try:
            dist.barrier()
        finally:
            waited = time.monotonic() - begun
            Path("gave-up").touch()
    return waited


def test_a_rank_that_does_not_come_is_noticed_after_the_step_timeout(tmp_path) -> None:
    waited = run_on_processes(
        wait_for_a_late_rank, 2, tmp_path, {"timeout.step_s": 1.0, "timeout.start_s": 100.0}
    )
    assert 0.9 < waited[0] < 90  # the step's time-out, not the start's


@pytest.mark.parametrize(("backend", "extra_s"), [("gloo", 0), ("nccl", 120)])
def test_the_public_function_sets_the_timeout_where_torch_has_it(
    backend, extra_s, monkeypatch
) -> None:
    # Under NCCL the watchdog ends the rank first.
    calls = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "set_timeout", lambda *given: calls.append(given), raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=["group"]))
    shorten_timeout(World(size=2), RunConfig())
    assert calls == [(timedelta(seconds=RunConfig().timeout.step_s + extra_s), "group")]


def test_alone_no_group_is_made_and_nothing_is_said(capfd) -> None:
    with join(RunConfig()) as world:
        assert world == World()
        assert not dist.is_initialized()
    assert capfd.readouterr() == ("", "")


def test_more_ranks_than_lanes_is_an_error_with_both_ways_out(monkeypatch, tmp_path) -> None:
    tmp_path.chmod(0o700)
    meeting = str(tmp_path / "meeting")
    for name, value in {"PACELINE_MEETING": meeting, "RANK": "0", "WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(name, value)
    four, few = (RunConfig(batch=BatchConfig(64, lanes=4)), RunConfig(batch=BatchConfig(3)))
    for config, both in (
        (four, "batch.lanes=5, or start at most 4"),
        (few, "batch.lanes=5 batch.global_size=5, or start at most 3"),
    ):
        with pytest.raises(ConfigError, match=both), join(config):
            pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="parallel=ddp"), join(RunConfig(parallel="none")):
        pass


def test_a_meeting_folder_that_others_can_enter_is_refused(tmp_path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    for name in ("open", "link"):
        with pytest.raises(EnvironmentUnfit, match="private folder(.|\n)*TMPDIR"):
            claim_folder(tmp_path / name)
    claim_folder(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_a_port_that_is_taken_says_so() -> None:
    with (
        listen_at("127.0.0.1", 0) as listener,
        pytest.raises(EnvironmentUnfit, match="MASTER_PORT to a free port"),
    ):
        listen_at("127.0.0.1", listener.getsockname()[1])


def meet(envs: list[dict[str, str]]) -> list[object]:
    """Join as a rank with the variables of another launcher; return what it is told, and where it listens."""
    own = envs[int(os.environ["RANK"])]
    for name in ("RANK", "WORLD_SIZE", handover.MEETING):
        del os.environ[name]
    os.environ |= own | {"TMPDIR": str(Path.cwd())}
    with join(RunConfig()) as world:
        total = sum_across(world, torch.tensor(world.rank + 1.0)).item()
        listening = sorted(set(open_listeners()))
        return [world.launcher, world.rank, world.size, world.nodes, total, listening]


def met(tmp_path, *envs: dict[str, str]) -> list[list[object]]:
    return run_on_processes(meet, len(envs), tmp_path, {}, {"envs": list(envs)})


def test_two_nodes_meet_at_one_address_and_nothing_listens_on_all_interfaces(tmp_path) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    shared["MASTER_PORT"] = str(free_port("127.0.0.1"))
    said = met(tmp_path, shared | {"RANK": "0"}, shared | {"RANK": "1"})
    assert said == [["torchrun", rank, 2, 2, 3.0, [LOOPBACK]] for rank in range(2)]


def test_tasks_of_srun_on_one_node_meet_in_a_private_folder_that_is_gone_afterwards(
    tmp_path,
) -> None:
    task = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1",
    }  # fmt: skip
    own = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    said = met(tmp_path, *(task | each for each in own))
    assert said == [["slurm", rank, 2, 1, 3.0, [LOOPBACK]] for rank in range(2)]
    assert list(tmp_path.rglob("paceline-*")) == []


def test_ranks_of_several_nodes_meet_where_rank_0_says_in_the_run_folder(tmp_path) -> None:
    shared = {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "PMIX_NAMESPACE": "prterun-a-7@1", "PACELINE_INTERFACE": "lo",
    }  # fmt: skip
    said = met(tmp_path, *(shared | {"OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(2)))
    assert said == [["openmpi", rank, 2, 2, 3.0, [LOOPBACK]] for rank in range(2)]
    (meetings,) = tmp_path.rglob("meetings")
    assert list(meetings.iterdir()) == []


MEET = """
import os, sys
sys.path.insert(0, {tests!r})
from world.test_process_group import open_listeners
import torch
import paceline
from paceline.world.collectives import sum_across
from paceline.world.process_group import join
with join(paceline.RunConfig()) as world:
    total = sum_across(world, torch.tensor(world.rank + 1.0)).item()
    words = world.launcher, world.rank, world.size, world.nodes, total, sorted(set(open_listeners()))
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())  # in one piece: mpirun mixes the ranks' pieces
"""


@pytest.mark.mpi
def test_mpirun_starts_ranks_that_meet(tmp_path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEET.format(tests=str(Path(__file__).parents[1])))
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    words = [*mpirun, sys.executable, str(script)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [f"openmpi {rank} 2 1 3.0 ['{LOOPBACK}']" for rank in range(2)]
    assert sorted(done.stdout.strip().splitlines()) == said


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"), [(0, 1, 0), (3, 1, 0), (0, 4, 0), (3, 4, 3)]
)
def test_the_gpu_is_the_local_rank_or_the_only_one_shown(local_rank, visible, index) -> None:
    assert gpu_index(World(local_rank=local_rank, local_size=4), visible) == index


def test_more_local_ranks_than_gpus_is_an_error() -> None:
    with pytest.raises(EnvironmentUnfit, match="start at most 2 ranks"):
        gpu_index(World(local_rank=2, local_size=4), 2)


def test_a_gpu_that_is_asked_for_must_be_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EnvironmentUnfit, match="device=cpu"), join(RunConfig(device="cuda")):
        pass
