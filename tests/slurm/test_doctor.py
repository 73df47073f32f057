"""The doctor finds, on emulated hosts and in a Slurm job, what would keep a training from starting."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

DOCTOR = [sys.executable, "-m", "paceline", "doctor", "--quick", "--json"]
HOSTS = ["n1", "n2", "n3"]


def by_check(text: str) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for one in json.loads(text)["findings"]:
        found.setdefault(one["check"], []).append(one)
    return found


@pytest.mark.heavy  # tests/doctor judges the same facts
@pytest.mark.namespaces(nodes=3)
def test_a_way_that_is_closed_and_a_name_that_stands_for_loopback_are_named(hosts, tmp_path: Path):
    """n2 sends nothing to n3, so neither reaches the other; n3 has the name that Debian's installer gives."""
    assert hosts.run(["ip", "route", "add", "blackhole", "10.77.0.13/32"], "n2").code == 0
    text = hosts.run(["cat", "/etc/hosts"], "n3").out
    (tmp_path / "hosts").write_text(
        "".join(
            f"{'127.0.1.1 n3' if line.endswith(' n3') else line}\n" for line in text.splitlines()
        )
    )
    assert hosts.run(["mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts"], "n3").code == 0

    def type_on(host: str):
        return hosts.run([*DOCTOR, "--nodes", "n[1-3]", "--wait", "90"], host, timeout_s=120)

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(type_on, HOSTS)
    assert [done.code for done in (first, *others)] == [1, 1, 1], first.err
    found = by_check(first.out)
    ways = [one["says"] for one in found["ways"]]
    cut = [(one["ok"], " ".join(one["says"].split()[:4])) for one in found["ways"]]
    assert cut == [(False, "n2 cannot reach n3:"), (False, "n3 cannot reach n2:")], ways
    assert "eth0 (10.77.0.11" in found["interface"][0]["says"]
    # n3 knows its way by its peers alone.
    assert all(one["ok"] for one in found["interface"]), found["interface"]
    (named,) = [one for one in found["host name"] if not one["ok"]]
    assert (named["hosts"], "n3 resolves to 127.0.1.1" in named["says"]) == (["n3"], True)
    assert found["clocks"][0]["ok"]


@pytest.mark.heavy  # tests/doctor judges the same facts
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
def test_a_request_that_does_not_match_what_is_there_is_named(slurm, tmp_path: Path):
    """Slurm's GPUs here are made up, and so are two of its four cores."""
    job = ["salloc", "-N2", "--ntasks-per-node=1", "--cpus-per-task=4", "--gres=gpu:2"]
    done = slurm.run([*job, *DOCTOR, "-n", "1"], folder=tmp_path, timeout_s=120)
    assert done.code == 1, done.err
    found = by_check(done.out)
    assert found["ranks"][0]["says"] == "all 2 reported, from 2 hosts"
    assert (
        "Slurm allocated 2 GPUs on n1, n2, but 0 are visible (CUDA_VISIBLE_DEVICES=0,1)"
        in found["slurm gpus"][0]["says"]
    )
    if len(os.sched_getaffinity(0)) < 4:
        assert "requested 4 cores per task, rank 0 on n1 has" in found["slurm cpus"][0]["says"]
    uneven = by_check(
        slurm.run(["salloc", "-N2", "-n3", *DOCTOR, "-n", "1"], folder=tmp_path, timeout_s=120).out
    )
    assert "not the same number on each node" in uneven["slurm tasks"][0]["says"]
    assert uneven["ways"][0]["ok"]
    twice = slurm.run(["srun", "-N2", *DOCTOR], folder=tmp_path, timeout_s=120)
    assert "run `paceline doctor` once, without srun" in twice.err
    assert sorted(file.name for file in tmp_path.iterdir()) == []
