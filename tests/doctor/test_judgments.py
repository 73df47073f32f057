"""Each fact gets the right finding: tables of made-up facts; other tests gather real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.doctor.cross_host import (
    AllocationRequest,
    judge_affinity,
    judge_clocks,
    judge_connectivity,
    judge_missing_ranks,
    judge_request,
    judge_versions,
)
from paceline.doctor.disk import DiskFacts, judge_disk
from paceline.doctor.finding import Finding, format_findings, merge_hosts, passed, problem
from paceline.doctor.gpu import Driver, judge_gpus, read_gpus
from paceline.doctor.network import Interface, NetworkFacts, judge_network
from paceline.doctor.rank_facts import RankFacts
from paceline.doctor.resources import Resources, judge_resources
from paceline.doctor.software import TorchFacts, judge_python, judge_torch, judge_variables
from paceline.doctor.startup import Package, Startup, judge_startup, summarize

H200 = "0, NVIDIA H200, 580.159.04, 143771, 0, Enabled, 0, 700.00, 700.00, 39, 0x0000000000000001, Disabled"
TORCH = TorchFacts("2.13.0+cu130", 3.0, "13.0", ["gloo", "nccl"], ["NVIDIA H200"] * 2, "2.28.9")
HOST = Resources((0, 1, 2, 3), 4, 0.0, 65536, -1, 8 << 30, 8 << 30, 64 << 30, has_rdma=True)
ETH, LO, IB = (
    Interface("eth0", "10.0.0.1", 10000, 1500),
    Interface("lo", "127.0.0.1"),
    Interface("ib0", "10.1.0.1", 200000),
)
NET = NetworkFacts("n1", ("10.0.0.1",), (LO, ETH), "10.0.0.1")
DISK = DiskFacts("/scratch/runs", "lustre", 10**12, fsync_s=0.01, speed=1e9)


def problems(found) -> dict[str, str]:
    """Return the problems by check; each has a fix."""
    bad = [one for one in found if not one.ok]
    assert all(one.fix for one in bad)
    assert all(not one.fix for one in found if one.ok)
    return {one.check: one.says for one in bad}


def gpus(*lines: str, failure: str = "", devices: int = 2) -> Driver:
    return Driver(read_gpus("\n".join(lines)), failure, devices)


def changed(place: int, word: str) -> str:
    words = H200.split(", ")
    words[place] = word
    return ", ".join(words)


@pytest.mark.parametrize(
    ("driver", "torch", "visible", "check", "says"),
    [
        (gpus(H200, H200), TORCH, None, "", ""),
        (gpus(H200, H200), replace(TORCH, gpus=["x"]), "1", "", ""),
        (Driver(), replace(TORCH, gpus=[]), None, "", ""),
        (gpus(H200), None, None, "", ""),
        (gpus(changed(6, "[N/A]"), changed(7, "[Not Supported]")), TORCH, None, "", ""),
        (gpus(failure="Unable to determine the device handle"), TORCH, None, "driver", "Unable to determine"),
        (gpus(devices=4), TORCH, None, "driver", "4 GPUs in /dev"),
        (gpus(H200, H200), replace(TORCH, gpus=["x"]), None, "gpus", "the driver lists 2 GPUs, torch sees 1"),
        (gpus(H200, H200), replace(TORCH, gpus=[]), "0,7", "gpus", "names 2 GPUs, torch sees 0 of 2"),
        (gpus(H200), replace(TORCH, cuda=""), None, "gpus", "built for CPUs"),
        (gpus(changed(4, "90000"), H200), TORCH, None, "gpu memory", "GPU 0: 90.0 GB of 143.8 GB"),
        (gpus(H200, changed(6, "2")), TORCH, None, "gpu ecc", "uncorrected memory errors: GPU 0: 2"),
        (gpus(H200, changed(7, "400.00")), TORCH, None, "gpu power", "400 of 700 W"),
        (gpus(H200, changed(10, "0x0000000000000040")), TORCH, None, "gpu power", "GPU 0 (thermal, hardware)"),
        (gpus(H200, changed(9, "93")), TORCH, None, "gpu power", "GPU 0 (93 °C)"),
        (gpus(H200, H200), replace(TORCH, no_peer=[[0, 1], [1, 0]]), None, "gpu peers", "between GPUs 0-1:"),
    ],
)  # fmt: skip
def test_gpus(driver, torch, visible, check, says):
    found = problems(list(judge_gpus(driver, torch, visible)))
    assert list(found) == ([check] if check else [])
    assert says in found.get(check, "")


@pytest.mark.parametrize(
    ("torch", "check", "says"),
    [
        (TORCH, "", ""),
        (TorchFacts(failure="did not answer in 180 s"), "torch", "did not answer in 180 s"),
        (replace(TORCH, version="2.9.1"), "torch", "too old"),
        (replace(TORCH, version="2.10.0a0+git"), "", ""),
        (replace(TORCH, import_s=95, import_cpu_s=5), "torch", "95.0 s (5.0 s of CPU): it waited"),
        (replace(TORCH, import_s=38, import_cpu_s=30), "torch", "it computed"),
        (replace(TORCH, import_s=38, import_cpu_s=8, import_queued_s=20), "torch", "for a core"),
        (replace(TORCH, import_s=29, import_cpu_s=1), "", ""),
        (replace(TORCH, error="cuda:1: CUDA error"), "torch", "a small sum fails: cuda:1"),
        (replace(TORCH, backends=["gloo"]), "backends", "no nccl"),
        (replace(TORCH, backends=["nccl"], gpus=[]), "backends", "no gloo"),
    ],
)
def test_torch(torch, check, says):
    found = problems(list(judge_torch(torch)))
    assert list(found) == ([check] if check else [])
    assert says in found.get(check, "")


def test_python_and_variables():
    assert judge_python((3, 11, 0), "p").ok
    assert "too old" in judge_python((3, 10, 9), "p").says
    assert list(judge_variables({"NCCL_P2P_DISABLE": "0"})) == []
    found = problems(list(judge_variables({"NCCL_P2P_DISABLE": "1"})))
    assert "NCCL_P2P_DISABLE=1" in found["variables"]


@pytest.mark.parametrize(
    ("host", "ranks", "env", "check"),
    [
        (HOST, 4, {}, ""),
        (HOST, 5, {}, "cores"),
        (replace(HOST, quota=1.5), 2, {}, "cores"),
        (HOST, 2, {"OMP_NUM_THREADS": "4"}, "cores"),
        (HOST, 2, {"OMP_NUM_THREADS": "2,1"}, ""),
        (replace(HOST, open_files=1024), 1, {}, "ulimit files"),
        (replace(HOST, open_files=-1), 1, {}, ""),
        (replace(HOST, locked_memory=65536), 1, {}, "ulimit memory"),
        (replace(HOST, locked_memory=65536, has_rdma=False), 1, {}, ""),
        (replace(HOST, shared_memory=64 << 20), 1, {}, "shared memory"),
        (replace(HOST, shared_memory=0, shared_memory_all=0), 1, {}, ""),
        (replace(HOST, memory=4 << 30), 4, {}, "memory"),
    ],
)
def test_host(host, ranks, env, check):
    assert list(problems(list(judge_resources(host, ranks, env)))) == ([check] if check else [])


@pytest.mark.parametrize(
    ("network", "env", "alone", "check", "says"),
    [
        (NET, {}, False, "", ""),
        (replace(NET, chosen="", refusal="no address"), {}, True, "", ""),
        (replace(NET, chosen="", refusal="no address"), {}, False, "interface", "no address"),
        (NET, {"GLOO_SOCKET_IFNAME": "eth7"}, False, "interface", "GLOO_SOCKET_IFNAME=eth7"),
        (NET, {"NCCL_SOCKET_IFNAME": "eth,ib"}, False, "", ""),
        (NET, {"NCCL_SOCKET_IFNAME": "^docker0"}, False, "", ""),
        (NET, {"NCCL_SOCKET_IFNAME": "ib"}, False, "interface", "NCCL_SOCKET_IFNAME=ib"),
        (replace(NET, interfaces=(LO, ETH, IB)), {}, False, "interface", "ib0 is faster, 200 Gbit/s"),
        (replace(NET, interfaces=(LO, Interface("docker0", "172.17.0.1"), ETH), chosen="172.17.0.1"), {}, False, "interface", "bridge"),
        (replace(NET, named=("127.0.1.1",)), {}, False, "host name", "n1 resolves to 127.0.1.1: other hosts"),
        (replace(NET, named=("127.0.1.1",)), {}, True, "", ""),
        (replace(NET, named=()), {}, False, "host name", "n1 resolves to no address"),
        (replace(NET, bindable="Cannot assign requested address"), {}, False, "ports", "Cannot assign"),
        (replace(NET, taken="Address already in use"), {"MASTER_PORT": "29500"}, False, "ports", "cannot bind MASTER_PORT=29500"),
        (NET, {"MASTER_PORT": "40000"}, False, "ports", "in the range of ephemeral ports (32768-60999)"),
        (replace(NET, ports=(50000, 50100)), {}, False, "ports", "50000-50100"),
    ],
)  # fmt: skip
def test_network(network, env, alone, check, says):
    found = problems(list(judge_network(network, env, alone=alone)))
    assert list(found) == ([check] if check else [])
    assert says in found.get(check, "")


@pytest.mark.parametrize(
    ("disk", "says"),
    [
        (DISK, ""),
        (replace(DISK, refusal="Permission denied"), "Permission denied"),
        (replace(DISK, kind="tmpfs"), "lost when the node goes down"),
        (replace(DISK, free=10**9), "nearly full"),
        (replace(DISK, fsync_s=2.0), "slow"),
        (replace(DISK, speed=1e6), "slow"),
    ],
)
def test_disk(disk, says):
    found = judge_disk(disk)
    assert (found.ok, says in found.says) == (not says, True)


def ranks(nodes: int = 2, each: int = 2, **more) -> list[RankFacts]:
    """Return ranks in order, two cores each."""
    return [
        RankFacts(node * each + local, f"n{node}", node, local, {"torch": "2.13.0", "python": "3.12"}, (2 * local, 2 * local + 1), **more)
        for node in range(nodes)
        for local in range(each)
    ]  # fmt: skip


def with_rank(number: int, **change) -> list[RankFacts]:
    return [replace(one, **change) if one.rank == number else one for one in ranks(3, 2)]


@pytest.mark.parametrize(
    ("judge", "facts", "says"),
    [
        (judge_versions, ranks(), []),
        (judge_versions, with_rank(4, versions={"torch": "2.12.0", "python": "3.12"}), ["torch differs: 2.13.0 on n0, n1, n2; 2.12.0 on n2"]),
        (judge_versions, with_rank(0, versions={"torch": "2.13.0"}), ["python differs: none on n0; 3.12 on n0, n1, n2"]),
        (judge_clocks, ranks(), []),
        (judge_clocks, ranks(1), []),
        (judge_clocks, with_rank(2, clock_s=0.3, clock_error_s=0.01), []),
        (judge_clocks, with_rank(2, clock_s=16.0, clock_error_s=0.01), ["the clock of n1 is 16.0 s ahead of n0"]),
        (judge_clocks, with_rank(2, clock_s=-16.0), ["the clock of n0 is 16.0 s ahead of n1"]),
        (judge_clocks, with_rank(2, clock_s=3.0, clock_error_s=2.5), []),
        (judge_clocks, with_rank(2, clock_error_s=float("inf")), []),
        (judge_connectivity, ranks(), []),
        (judge_connectivity, ranks(1), []),
        (judge_connectivity, with_rank(2, unreached={2: "timed out"}), ["n1 cannot reach n2 (n2 reaches n1): timed out"]),
        (judge_connectivity, [replace(one, unreached={node: "off" for node in range(3) if node != one.node and 1 in {node, one.node}}) for one in ranks(3, 1)], ["no other host can reach n1: off"]),
        (judge_affinity, ranks(), []),
        (judge_affinity, [replace(one, cores=(0, 1, 2, 3)) for one in ranks()], []),
        (judge_affinity, [replace(one, cores=(0,)) for one in ranks()], ["2 ranks of n0 are bound to the same 1 core (0)"]),
        (judge_affinity, [replace(one, cores=(one.local_rank, 2, 3)) for one in ranks()], ["ranks of n0 are bound to overlapping cores: 0,2-3; 1-3"]),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_together(judge, facts, says):
    found = judge(facts)
    assert list(problems([found] if isinstance(found, Finding) else list(found)).values()) == says


def test_ranks_that_did_not_report():
    assert judge_missing_ranks(ranks(), 4, []).ok
    missing = judge_missing_ranks(ranks(), 7, [])
    assert "ranks 4-6 of 7 did not report" in missing.says
    told = judge_missing_ranks(ranks(), 5, [("n3", "cannot reach rank 0", "open the firewall")])
    assert (told.says, told.fix) == (
        "rank 4 of 5 did not report; error on n3: cannot reach rank 0",
        "open the firewall",
    )


ASKED = AllocationRequest("7", nodes=2, tasks=4, tasks_on=(2, 2), cpus_per_task=2, gpus_per_node=2)


@pytest.mark.parametrize(
    ("request_", "facts", "check", "says"),
    [
        (ASKED, ranks(gpus_seen=2, gpus_given=2), "", ""),
        (ASKED, ranks(gpus_seen=1, gpus_given=2, visible="0"), "", ""),
        (AllocationRequest("7", 1), ranks(1, 1, gpus_seen=0), "", ""),
        (replace(ASKED, tasks_on=(3, 1)), ranks(gpus_seen=2), "slurm tasks", "3,1: not the same number"),
        (replace(ASKED, gpus_per_node=4), ranks(gpus_seen=4), "slurm tasks", "4 GPUs per node: use one rank per GPU"),
        (replace(ASKED, cpus_per_task=8), ranks(gpus_seen=2), "slurm cpus", "requested 8 cores per task, rank 0 on n0 has 2 (0-1)"),
        (ASKED, ranks(gpus_seen=0, gpus_given=2, visible="0,1"), "slurm gpus", "Slurm allocated 2 GPUs on n0, n1, but 0 are visible"),
        (replace(ASKED, gpus_per_node=0), ranks(gpus_seen=8), "slurm gpus", "8 GPUs are visible on n0, n1, but the job requested none"),
    ],
)  # fmt: skip
def test_what_slurm_was_asked_for(request_, facts, check, says):
    found = problems(list(judge_request(request_, facts)))
    assert list(found) == ([check] if check else [])
    assert says in found.get(check, "")


def test_what_hosts_say_alike_is_one_line():
    same, slow = passed("python", "3.12"), problem("disk", "slow", "scratch")
    hosts = {"a": [same, passed("disk", "1 ms")], "b": [same, passed("disk", "2 ms")]}
    found = merge_hosts([*hosts.items(), ("c", [same, slow])])
    assert format_findings(found, 3) == [
        "ok       python  3.12",
        "ok       disk    1 ms (a)",
        "problem  disk    slow (c)",
        "                 fix: scratch",
    ]


IMPORTS = "import time:      1000 |      2000 |     numpy.core\nimport time: 3000000 |  3000000 | torch\nWarning: x\nimport time: 10 | 10 | json"
CALLS = '12 openat(AT_FDCWD, "/v/site-packages/torch/a.py", O_RDONLY) = 3\n12 newfstatat(AT_FDCWD, "/v/site-packages/b.so", 0x7, 0) = -1 ENOENT (No such file)\n12 newfstatat(3, "", {}, AT_EMPTY_PATH) = 0\n+++ exited'


def test_a_start_is_summed_up_by_package():
    roots = {"packages": "/v/site-packages", "python": "/v/lib", "base": "/usr/lib/python3"}
    seen = {
        "whole_s": 4.0,
        "stepped": True,
        "opened": {"/v/site-packages/torch/a.py": 2, "/me/x.py": 1, "/proc/stat": 1},
    }
    start = summarize("x.py", seen, IMPORTS, CALLS, roots)
    assert next(one.name for one in start.packages) == "torch"
    assert Package("torch", 3.0, 2, 1) in start.packages
    assert (start.opened, start.calls, start.not_found, start.uncompiled) == (4, 2, 1, 1)
    assert summarize("x.py", seen, IMPORTS, None, roots).calls == -1


START = Startup(
    "x.py", 5.0, True, [Package("torch", 3.0), Package("(Python itself)", 1.0)], 2000, kind="ext4"
)


@pytest.mark.parametrize(
    ("start", "check", "says"),
    [
        (START, "", ""),
        (replace(START, kind="nfs4"), "files", "a network file system that every rank reads"),
        (replace(START, kind="lustre"), "files", "packages are on lustre"),
        (replace(START, packages=[Package("torch", 60.0)]), "time", "60.0 s of it imports"),
        (
            replace(START, packages=[Package("torch", 3.0), Package("transformers", 4.0)]),
            "time",
            "transformers (4.0 s)",
        ),
        (replace(START, uncompiled=400), "compiled", "400 modules"),
    ],
)
def test_what_a_start_costs(start, check, says):
    found = problems(judge_startup(start))
    assert list(found) == ([check] if check else [])
    assert says in found.get(check, "")
