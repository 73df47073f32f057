"""Is the cluster a real Slurm, do its nodes fail on demand, and does it leave nothing behind?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.leak_check import cgroups_of, devices, namespaces_of, processes_in, processes_that_know
from support.private_cluster import cluster_or_skip, wanted
from support.slurm_cluster.commands import wait_until
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.jobs import exit_code

TRACKING = {"linuxproc": {}, "cgroup": {"cgroup": True}}
both_ways_of_tracking = pytest.mark.parametrize(
    "slurm", TRACKING.values(), ids=TRACKING, indirect=True
)
WHO = "echo $SLURM_PROCID $(hostname) $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; a Slurm that does not answer in time is asked again."""
    wait_until("what the test waits for", condition, timeout_s=200)


@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
@both_ways_of_tracking
def test_a_job_runs_on_all_nodes(slurm):
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", "--gpus-per-node=2", "sh", "-c", WHO])
    assert sorted(done.out.splitlines()) == ["0 n1 n1 0,1", "1 n2 n2 0,1"]
    assert (done.code, done.err) == (0, "")


@pytest.mark.slurm(nodes=2)
def test_exit_codes_come_back(slurm):
    assert slurm.run(["srun", "-N2", "sh", "-c", "exit 3"]).code == 3
    assert slurm.run(["no-such-command"]).code == 127
    assert slurm.run(["sh", "-c", "kill -9 $$"], node="n2").code == 128 + 9
    job = slurm.submit("--nodelist=n1", "--wrap", "sleep 1; echo from $(hostname); exit 5")
    assert (job["JobState"], exit_code(job)) == ("FAILED", 5)
    assert Path(job["StdOut"]).read_text() == "from n1\n"
    assert Path(job["StdOut"]).parent == slurm.work


@pytest.mark.slurm(nodes=1)
def test_who_waits_too_long_is_told_and_the_job_is_cancelled(slurm):
    jobid = slurm.sbatch("--wrap", "sleep 100")
    with pytest.raises(ClusterError, match="cancelled"):
        slurm.wait(jobid, timeout_s=0.5)
    assert slurm.wait(jobid)["JobState"] == "CANCELLED"


@pytest.mark.slurm(nodes=2, settings={"SlurmdTimeout": 4})
def test_a_node_without_power_is_noticed_and_comes_back(slurm):
    jobid = slurm.sbatch("-N2", "--no-requeue", "--wrap", "sleep 100")
    wait_for(lambda: slurm.job(jobid)["JobState"] == "RUNNING")
    slurm.power_off("n2")
    with pytest.raises(ClusterError, match="n2 is not up"):
        slurm.power_off("n2")
    assert slurm.wait(jobid)["JobState"] == "NODE_FAIL"
    assert slurm.states()["n2"].startswith("down")
    slurm.power_on("n2")
    wait_for(lambda: set(slurm.states().values()) == {"idle"})
    assert slurm.run(["srun", "-N2", "true"]).code == 0


@pytest.mark.slurm(nodes=1)
def test_a_job_outlives_its_slurmd(slurm):
    jobid = slurm.sbatch("--wrap", "touch runs; until [ -e go ]; do sleep 0.1; done")
    wait_for(lambda: (slurm.work / "runs").exists())  # noqa: PLW0108
    slurm.slurmd("n1", "kill")
    slurm.slurmd("n1", "start")
    (slurm.work / "go").touch()
    assert slurm.wait(jobid)["JobState"] == "COMPLETED"


@pytest.mark.slurm(nodes=1, cgroup=True)
def test_with_cgroups_memory_is_limited(slurm):
    done = slurm.run(["srun", "--mem=50", sys.executable, "-c", "bytearray(200 << 20)"])
    assert done.code != 0
    assert "oom-kill" in done.err


@pytest.mark.slurm(nodes=1)
def test_another_user_may_run_jobs(slurm):
    done = slurm.run(["srun", "id", "-un"], user="nobody", folder=Path("/"))
    assert (done.out, done.err, done.code) == ("nobody\n", "", 0)


@pytest.mark.slurm
def test_a_cluster_that_cannot_start_says_why():
    with (
        pytest.raises(ClusterError, match="NoSuchKey"),
        cluster_or_skip(wanted(nodes=1, settings={"NoSuchKey": 1})),
    ):
        pass


@pytest.mark.slurm
@pytest.mark.parametrize("tracking", TRACKING.values(), ids=TRACKING)
def test_the_end_leaves_nothing_behind(tracking):
    before = devices()
    with cluster_or_skip(wanted(nodes=2, **tracking)) as slurm:
        step = "trap '' TERM; touch $SLURMD_NODENAME; while sleep 1; do :; done"
        slurm.run(["sh", "-c", 'setsid srun -N2 sh -c "$0" >/dev/null 2>&1 &', step])
        wait_for(lambda: {file.name for file in slurm.work.iterdir()} == {"n1", "n2"})
        folder, namespaces = slurm.place.folder, namespaces_of(slurm.place)
        assert len(namespaces) == 9
        assert len(processes_in(namespaces)) >= 9
        assert processes_that_know(folder)
        assert bool(cgroups_of(slurm.place)) == bool(tracking)
    assert not folder.exists()
    wait_for(lambda: processes_in(namespaces) == [])  # the kernel may take a moment to bury them
    assert processes_that_know(folder) == []
    assert cgroups_of(slurm.place) == []
    assert devices() <= before
