"""Are the emulated hosts and their Slurm real, do they fail on demand, leave nothing behind, and say why there are none?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.leak_check import cgroups_of, devices, namespaces_of, processes_in, processes_that_know
from support.private_cluster import PrivateCluster, cluster_or_skip, wanted
from support.slurm_cluster import packages, requirements
from support.slurm_cluster.commands import wait_until
from support.slurm_cluster.errors import ClusterError, NotAvailable
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import Settings

TRACKING = {"linuxproc": {}, "cgroup": {"cgroup": True}}
WHO = "echo $SLURM_PROCID $(hostname) $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
PROBE = """
import socket, sys, time
start = time.perf_counter()
try:
    socket.create_connection((sys.argv[1], 9), timeout=float(sys.argv[2]))
except ConnectionRefusedError:  # nobody listens there, but the host has answered
    print(time.perf_counter() - start)
except OSError:
    print("inf")
"""
OWNER = """
import sys
from support.private_cluster import private_cluster, wanted
with private_cluster(wanted(nodes=1, slurm=False)) as cluster:
    print(cluster.place.folder, flush=True)
    sys.stdin.read()
"""
NEVER = float("inf")


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; a Slurm that does not answer in time is asked again."""
    wait_until("what the test waits for", condition, timeout_s=200)


def seconds_between(hosts: PrivateCluster, one: str, other: str, patience_s: float = 10) -> float:
    """Return after how many seconds another host has answered, which on a busy machine may be many."""
    return float(hosts.run([sys.executable, "-c", PROBE, other, str(patience_s)], one).out)


def is_cut_and_mended(hosts: PrivateCluster, one: str, other: str) -> bool:
    """Cut the link of a host and mend it, which the kernel takes up to a second to notice."""
    hosts.link(other, "down")
    is_cut = seconds_between(hosts, one, other, patience_s=0.5) == NEVER
    hosts.link(other, "up")
    return is_cut and any(seconds_between(hosts, one, other) < NEVER for _ in range(20))


@pytest.mark.heavy
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
@pytest.mark.parametrize("slurm", TRACKING.values(), ids=TRACKING, indirect=True)
def test_a_job_runs_on_all_nodes_and_its_exit_code_comes_back(slurm) -> None:
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", "--gpus-per-node=2", "sh", "-c", WHO])
    assert sorted(done.out.splitlines()) == ["0 n1 n1 0,1", "1 n2 n2 0,1"]
    assert (done.code, done.err) == (0, "")
    assert slurm.run(["srun", "-N2", "sh", "-c", "exit 3"]).code == 3
    assert slurm.run(["sh", "-c", "kill -9 $$"], node="n2").code == 128 + 9
    job = slurm.submit("--nodelist=n1", "--wrap", "echo from $(hostname); exit 5")
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "5:0")
    assert Path(job["StdOut"]).read_text() == "from n1\n"


@pytest.mark.heavy
@pytest.mark.slurm(nodes=2, settings={"SlurmdTimeout": 4})
def test_a_node_without_power_is_noticed_and_comes_back(slurm) -> None:
    jobid = slurm.sbatch("-N2", "--no-requeue", "--wrap", "sleep 100")
    wait_for(lambda: slurm.job(jobid)["JobState"] == "RUNNING")
    slurm.power_off("n2")
    with pytest.raises(ClusterError, match="n2"):
        slurm.power_off("n2")
    assert slurm.wait(jobid)["JobState"] == "NODE_FAIL"
    slurm.power_on("n2")
    wait_for(lambda: set(slurm.states().values()) == {"idle"})
    assert slurm.run(["srun", "-N2", "true"]).code == 0


@pytest.mark.heavy
@pytest.mark.slurm(nodes=1, cgroup=True)
def test_a_job_outlives_its_slurmd_is_cancelled_in_time_and_has_a_limit_of_memory(slurm) -> None:
    jobid = slurm.sbatch("--wrap", "touch runs; until [ -e go ]; do sleep 0.1; done")
    wait_for(lambda: (slurm.work / "runs").exists())  # noqa: PLW0108
    slurm.slurmd("n1", "kill")
    slurm.slurmd("n1", "start")
    (slurm.work / "go").touch()
    assert slurm.wait(jobid)["JobState"] == "COMPLETED"
    jobid = slurm.sbatch("--wrap", "sleep 100")
    with pytest.raises(ClusterError, match="cancelled"):
        slurm.wait(jobid, timeout_s=0.5)
    assert slurm.wait(jobid)["JobState"] == "CANCELLED"
    done = slurm.run(["srun", "--mem=50", sys.executable, "-c", "bytearray(200 << 20)"])
    assert (done.code != 0, "oom-kill" in done.err) == (True, True)


@pytest.mark.heavy
@pytest.mark.slurm
def test_a_cluster_that_cannot_start_says_why() -> None:
    settings = wanted(nodes=1, settings={"NoSuchKey": 1})
    with pytest.raises(ClusterError, match="NoSuchKey"), cluster_or_skip(settings):
        pass


@pytest.mark.heavy
@pytest.mark.slurm
@pytest.mark.parametrize("tracking", TRACKING.values(), ids=TRACKING)
def test_the_end_leaves_nothing_behind(tracking) -> None:
    before = devices()
    with cluster_or_skip(wanted(nodes=2, **tracking)) as slurm:
        step = "trap '' TERM; touch $SLURMD_NODENAME; while sleep 1; do :; done"
        slurm.run(["sh", "-c", 'setsid srun -N2 sh -c "$0" >/dev/null 2>&1 &', step])
        wait_for(lambda: {file.name for file in slurm.work.iterdir()} == {"n1", "n2"})
        folder, namespaces = slurm.place.folder, namespaces_of(slurm.place)
        assert len(processes_in(namespaces)) >= len(namespaces) == 9
        assert processes_that_know(folder)
        assert bool(cgroups_of(slurm.place)) == bool(tracking)
    assert not folder.exists()
    wait_for(lambda: processes_in(namespaces) == [])  # the kernel may take a moment to bury them
    assert (processes_that_know(folder), cgroups_of(slurm.place)) == ([], [])
    assert devices() <= before


@pytest.mark.heavy
@pytest.mark.namespaces(nodes=2)
def test_every_node_is_a_host_whose_link_is_cut_slowed_and_mended(hosts) -> None:
    look = "hostname; echo $$; ip -br -4 addr show eth0; touch /dev/shm/mine; ls /dev/shm"
    for node, address in {"n1": "10.77.0.11", "n2": "10.77.0.12"}.items():
        name, pid, network, *shared_memory = hosts.run(["sh", "-c", look], node).out.splitlines()
        assert (name, shared_memory) == (node, ["mine"])
        assert int(pid) < 10
        assert address in network
    assert seconds_between(hosts, "n2", "head") < NEVER
    assert is_cut_and_mended(hosts, "n1", "n2")
    for verb, limited in (("rate 100mbit", True), ("clear", False)):
        hosts.link("n2", *verb.split())
        assert ("tbf" in hosts.run(["tc", "qdisc", "show", "dev", "eth0"], "n2").out) == limited


@pytest.mark.heavy
@pytest.mark.namespaces(nodes=2, delay_ms=20, rate="1gbit")
def test_the_relay_delays_and_cuts(hosts) -> None:
    assert 0.04 <= seconds_between(hosts, "n1", "n2") < NEVER
    assert is_cut_and_mended(hosts, "n1", "n2")


@pytest.mark.heavy
@pytest.mark.namespaces
def test_folders_are_local_or_shared_and_a_command_that_takes_too_long_is_ended(tmp_path) -> None:
    local, shared = tmp_path / "local", tmp_path / "local" / "shared"
    shared.mkdir(parents=True)
    settings = wanted(nodes=2, slurm=False, node_local=(str(local),), shared=(str(shared),))
    with cluster_or_skip(settings) as hosts:
        for node in ("n1", "n2"):
            hosts.run(["sh", "-c", f"touch {local}/$(hostname) {shared}/$(hostname)"], node)
        assert hosts.run(["ls", str(local)], "n1").out.split() == ["n1", "shared"]
        assert hosts.run(["ls", str(shared)], "n1").out.split() == ["n1", "n2"]
        deaf = "trap '' TERM; echo begun; while sleep 0.1; do :; done"
        with pytest.raises(AssertionError, match="5 s: begun"):
            hosts.run(["sh", "-c", deaf], "n1", timeout_s=5)
        namespaces, inits = namespaces_of(hosts.place), ["init-head", "init-n1", "init-n2"]
        wait_for(lambda: sorted(one.split()[1] for one in processes_in(namespaces)) == inits)
    assert sorted(path.name for path in local.iterdir()) == ["shared"]


@pytest.mark.heavy
@pytest.mark.namespaces
def test_a_cluster_ends_with_its_owner() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    words, pipe = [sys.executable, "-c", OWNER], subprocess.PIPE
    with subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True) as owner:
        place = Place(Path(owner.stdout.readline().strip()))
        namespaces = namespaces_of(place)
        assert len(processes_in(namespaces)) == 2
        owner.send_signal(signal.SIGKILL)
    wait_for(lambda: not place.folder.exists())
    wait_for(lambda: processes_in(namespaces) == [])


def put_program(folder: Path, name: str, complaint: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")
    (folder / name).chmod(0o755)


def test_where_there_can_be_no_cluster_the_reason_is_said(tmp_path, monkeypatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert requirements.why_no_hosts() == "needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "iproute2 and util-linux" in requirements.why_no_hosts()
    for name in ("ip", "nsenter", "unshare"):
        put_program(programs, name, "Operation not permitted")
    with pytest.raises(NotAvailable, match="Operation not permitted"):
        requirements.check(Settings())
    with pytest.raises(NotAvailable, match="apt-get"):
        packages.provide(Settings(pkg=str(tmp_path / "packages")))
    put_program(programs, "dpkg", "")
    put_program(programs, "apt-get", "Unable to locate slurmctld")
    with pytest.raises(NotAvailable, match="Unable to locate slurmctld"):
        packages.provide(Settings(pkg=str(tmp_path / "packages")))
    (tmp_path / "ours").symlink_to(programs)
    monkeypatch.setattr(packages, "shared_packages", lambda: tmp_path / "ours")
    with pytest.raises(NotAvailable, match="ours"):
        packages.provide(Settings(pkg=str(tmp_path / "ours")))
