"""Are the nodes hosts of their own, with a network that can be cut, slowed and delayed?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.leak_check import namespaces_of, processes_in
from support.private_cluster import TOOL, PrivateCluster, cluster_or_skip, wanted
from support.slurm_cluster.commands import wait_until
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place

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


def seconds_between(hosts: PrivateCluster, one: str, other: str, patience_s: float = 10) -> float:
    """Return after how many seconds another host has answered, which on a busy machine may be many."""
    return float(hosts.run([sys.executable, "-c", PROBE, other, str(patience_s)], one).out)


def is_cut_off(hosts: PrivateCluster, one: str, other: str) -> bool:
    """Return whether no answer comes, as far as a moment can tell."""
    return seconds_between(hosts, one, other, patience_s=0.5) == NEVER


def is_reached_again(hosts: PrivateCluster, one: str, other: str) -> bool:
    """Wait until a link that was mended carries again: the kernel takes up to a second to notice that it may."""
    return any(seconds_between(hosts, one, other) < NEVER for _ in range(20))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so: the kernel may take a moment to bury the dead."""
    wait_until("what the test waits for", condition, timeout_s=60)


@pytest.mark.namespaces(nodes=2)
def test_every_node_is_a_host(hosts):
    look = "hostname; echo $$; ip -br -4 addr show eth0; touch /dev/shm/mine; ls /dev/shm"
    for node, address in {"n1": "10.77.0.11", "n2": "10.77.0.12"}.items():
        name, pid, network, *shared_memory = hosts.run(["sh", "-c", look], node).out.splitlines()
        assert (name, shared_memory) == (node, ["mine"])
        assert int(pid) < 10
        assert address in network
    assert seconds_between(hosts, "n1", "n2") < NEVER
    assert seconds_between(hosts, "n2", "head") < NEVER


@pytest.mark.namespaces(nodes=2)
def test_a_link_is_cut_slowed_and_mended(hosts):
    hosts.link("n2", "down")
    assert is_cut_off(hosts, "n1", "n2")
    hosts.link("n2", "up")
    assert is_reached_again(hosts, "n1", "n2")
    hosts.link("n2", "rate", "100mbit")
    assert "tbf" in (limited := hosts.run(["tc", "qdisc", "show", "dev", "eth0"], "n2").out)
    assert "100Mbit" in limited
    hosts.link("n2", "clear")
    assert "tbf" not in hosts.run(["tc", "qdisc", "show", "dev", "eth0"], "n2").out
    with pytest.raises(ClusterError, match="such as 1gbit"):
        hosts.link("n2", "rate")


@pytest.mark.namespaces(nodes=2, delay_ms=20, rate="1gbit")
def test_the_relay_delays_and_cuts(hosts):
    assert 0.04 <= seconds_between(hosts, "n1", "n2") < NEVER
    hosts.link("n2", "down")
    assert is_cut_off(hosts, "n1", "n2")
    assert seconds_between(hosts, "n1", "head") < NEVER
    hosts.link("n2", "up")
    assert is_reached_again(hosts, "n1", "n2")
    with pytest.raises(ClusterError, match="fixed at the start"):
        hosts.link("n2", "rate", "100mbit")


@pytest.mark.namespaces
def test_folders_are_local_or_shared(tmp_path):
    local, shared = tmp_path / "local", tmp_path / "local" / "shared"
    shared.mkdir(parents=True)
    settings = wanted(nodes=2, slurm=False, node_local=(str(local),), shared=(str(shared),))
    with cluster_or_skip(settings) as hosts:
        for node in ("n1", "n2"):
            hosts.run(["sh", "-c", f"touch {local}/$(hostname) {shared}/$(hostname)"], node)
        assert hosts.run(["ls", str(local)], "n1").out.split() == ["n1", "shared"]
        assert hosts.run(["ls", str(shared)], "n1").out.split() == ["n1", "n2"]
    assert sorted(path.name for path in local.iterdir()) == ["shared"]


@pytest.mark.namespaces(nodes=1)
def test_a_command_that_takes_too_long_is_ended(hosts):
    with pytest.raises(AssertionError, match="took more than 10 s: begun"):
        hosts.run(
            ["sh", "-c", "trap '' TERM; echo begun; while sleep 0.1; do :; done"],
            "n1",
            timeout_s=10,
        )
    namespaces = namespaces_of(hosts.place)
    wait_for(
        lambda: (
            [process.split()[1] for process in processes_in(namespaces)] == ["init-head", "init-n1"]
        )
    )


@pytest.mark.namespaces
def test_a_cluster_ends_with_its_owner():
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        place = Place(Path(owner.stdout.readline().strip()))
        namespaces = namespaces_of(place)
        assert len(processes_in(namespaces)) == 2
        owner.send_signal(signal.SIGKILL)
    wait_for(lambda: not place.folder.exists())
    wait_for(lambda: processes_in(namespaces) == [])


@pytest.mark.namespaces
def test_the_command_line(tmp_path):
    def cluster(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [*TOOL, "--dir", str(tmp_path), *words], capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    start = ("start", "--no-slurm", "--nodes", "2")
    try:
        assert cluster("status") == (3, "stopped\n")
        assert cluster(*start)[1].startswith("2 nodes up in ")
        assert cluster(*start) == (0, "already running\n")
        assert (
            "stop it first" in cluster("start", "--no-slurm")[1] + cluster(*start, "--gpus", "1")[1]
        )
        assert cluster("power-off", "n2") == (0, "")
        assert [line.split()[:3] for line in cluster("status")[1].splitlines()][2] == [
            "n2",
            "10.77.0.12",
            "off",
        ]
        assert cluster("power-on", "n2") == (0, "")
        assert cluster("run", "--node", "n2", "--", "hostname") == (0, "n2\n")
        assert cluster("hold")[0] == 1
    finally:
        assert cluster("stop") == (0, "")
    assert cluster("stop") == (0, "")
    assert cluster("run", "--", "true") == (1, "cluster: head is not up\n")
    assert cluster("start", "--nodes", "201") == (1, "cluster: 201 nodes: 1 to 200 are possible\n")
