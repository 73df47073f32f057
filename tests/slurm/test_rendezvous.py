"""Do tasks of several nodes find each other, whatever else runs there, and say within seconds why they cannot?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.private_cluster import cluster_or_skip, wanted
from support.program import wait_until

MEET = """
import os, time
import torch, paceline
from paceline.world.collectives import sum_across
from paceline.world.process_group import join
begun = time.monotonic()
try:
    with join(paceline.config_from_argv()) as world:
        total = sum_across(world, torch.tensor(world.rank + 1.0)).item()
        words = "met", world.rank, world.size, world.nodes, total, os.environ["GLOO_SOCKET_IFNAME"]
        time.sleep(float(os.environ.get("STAY_S", "0")))
except paceline.PacelineError as error:
    words = "not", f"{time.monotonic() - begun:.1f}", *str(error).split()
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
    raise SystemExit(error.exit_code)
os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
"""
EACH = """
import json, os, sys
import torch, paceline
from multiprocessing import Process

def meet(number, variable, value):
    os.environ[variable] = value
    sys.argv = ["meet.py", f"name=case-{number}"]
    os.dup2(os.open(f"case-{number}-{os.environ['SLURM_PROCID']}", os.O_WRONLY | os.O_CREAT), 1)
    exec(compile(MEET, "meet.py", "exec"), {"__name__": "__main__"})

codes = []
for number, case in enumerate(json.loads(sys.argv[1])):
    process = Process(target=meet, args=(number, *case))
    process.start()
    process.join()
    codes.append(process.exitcode)
print(*codes)
"""
BOTH_MET = [f"met {rank} 2 2 3.0 eth0" for rank in range(2)]
pytestmark = [pytest.mark.slow, pytest.mark.heavy]  # tests/world sees the same without a cluster


@pytest.fixture
def meet(tmp_path: Path) -> list[str]:
    """The words of a small script that only meets."""
    (tmp_path / "meet.py").write_text(MEET)
    return [sys.executable, str(tmp_path / "meet.py")]


def refusals(out: str) -> tuple[float, set[str]]:
    """Return after how many seconds the last rank gave up, and the words that all had."""
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert [line[0] for line in lines] == ["not"] * 2, out
    return max(float(line[1]) for line in lines), {line[2] for line in lines}


@pytest.mark.slurm(nodes=2, cpus=4, gpus=0)
def test_jobs_at_the_same_moment_do_not_clash(slurm, meet, tmp_path: Path):
    """Three jobs of one run on the same nodes, two of them of an array, the third with a port of its own."""
    own = ("--output", str(tmp_path / "%j.out"), "--wrap", f"srun {' '.join(meet)}")
    env = {"STAY_S": "3"}
    slurm.sbatch("--array=0-1", "-N2", "-n2", *own, folder=tmp_path, env=env)
    slurm.sbatch("-N2", "-n2", *own, folder=tmp_path, env=env | {"MASTER_PORT": "29499"})

    def is_empty() -> bool:
        asked = slurm.run(["squeue", "--noheader"])
        return (asked.code, asked.out) == (0, "")  # one that fails says nothing, either

    wait_until(is_empty, "the queue is empty")
    outputs = [sorted(file.read_text().splitlines()) for file in tmp_path.glob("*.out")]
    assert outputs == [BOTH_MET] * 3
    assert list((tmp_path / "runs" / "meet" / "meetings").iterdir()) == []
    assert (tmp_path / "runs" / "meet" / "meetings").stat().st_mode & 0o777 == 0o700


@pytest.mark.slurm(nodes=2, cpus=4, gpus=0)
def test_what_cannot_work_is_one_error_on_all_ranks_in_seconds(slurm, tmp_path):
    """Every case has processes of its own, forked from tasks that have imported torch, and a run of its own to meet in."""
    table = [
        ("PACELINE_INTERFACE", "nope0", ["'nope0'", "n1", "lo, eth0"]),
        ("GLOO_SOCKET_IFNAME", "nope0", ["'nope0'", "lo, eth0"]),
        ("GLOO_SOCKET_IFNAME", "lo", ["127.0.0.1", "PACELINE_INTERFACE"]),
        ("SLURM_STEP_NODELIST", "n[1-", ["'n[1-'", "MASTER_ADDR"]),
    ]
    (tmp_path / "each.py").write_text(f"MEET = {MEET!r}\n{EACH}")
    cases = json.dumps([case[:2] for case in table])
    done = slurm.run(["srun", "-N2", "-n2", sys.executable, "each.py", cases], folder=tmp_path)
    assert (done.code, done.out.splitlines()) == (0, ["3 3 3 3"] * 2), done
    for number, (_, _, words) in enumerate(table):
        files = [tmp_path / f"case-{number}-{rank}" for rank in range(2)]
        waited_s, said = refusals("".join(file.read_text() for file in files))
        assert (waited_s < 60, len(said)) == (True, 1), said
        text = said.pop()
        assert all(word in text for word in words), text


@pytest.mark.slurm(nodes=2, cpus=4, gpus=0)
def test_names_that_stand_for_loopback_do_no_harm(slurm, meet, tmp_path: Path):
    """As Debian's installer writes /etc/hosts: a machine's own name is 127.0.1.1."""
    for node in ("n1", "n2"):
        text = slurm.run(["cat", "/etc/hosts"], node).out
        own = "\n".join(
            f"127.0.1.1 {node}" if line.endswith(f" {node}") else line for line in text.splitlines()
        )
        (tmp_path / node).write_text(own + "\n")
        assert slurm.run(["mount", "--bind", str(tmp_path / node), "/etc/hosts"], node).code == 0
    assert slurm.run(["getent", "hosts", "n1"], "n1").out.startswith("127.0.1.1")
    done = slurm.run(["srun", "-N2", "-n2", *meet], folder=tmp_path)
    assert (sorted(done.out.splitlines()), done.code) == (BOTH_MET, 0), done.err


@pytest.mark.slurm(nodes=2, cpus=4, gpus=0)
def test_a_node_that_cannot_reach_rank_0_says_so_and_rank_0_hears_of_it(
    slurm, meet, tmp_path: Path
):
    assert slurm.run(["ip", "route", "add", "unreachable", "10.77.0.11"], "n2").code == 0
    done = slurm.run(["srun", "-N2", "-n2", *meet], folder=tmp_path)
    waited_s, said = refusals(done.out)
    assert (done.code, waited_s < 60, len(said)) == (3, True, 1), done.out
    assert "n2 (no route) cannot reach rank 0 at 10.77.0.11:" in said.pop()


@pytest.mark.slurm
def test_a_folder_that_is_not_shared_is_found_out(meet, tmp_path: Path):
    local = tmp_path / "local"
    local.mkdir()
    with cluster_or_skip(wanted(nodes=2, gpus=0, node_local=(str(local),))) as slurm:
        words = [*meet, f"runs={local}/runs", "timeout.start_s=5"]
        done = slurm.run(["srun", "-N2", "-n2", *words], folder=tmp_path)
    waited_s, said = refusals(done.out)
    assert (done.code, waited_s < 60) == (3, True), done.out
    assert any("put runs= on a file system that all nodes share" in text for text in said)
    assert any("rank 1 did not join within 5 s" in text for text in said)


@pytest.mark.slurm(nodes=1, cpus=4, gpus=0)
def test_the_end_of_the_job_is_asked_of_slurm(slurm):
    """No SLURM_JOB_END_TIME is set by Slurm 22.05."""
    ask = "import os, time; from paceline.world.job import job_end; print(job_end(os.environ) - time.time())"
    for limit, least, most in (("10", 560, 601), ("UNLIMITED", float("inf"), float("inf"))):
        done = slurm.run(["srun", f"--time={limit}", sys.executable, "-c", ask])
        assert least <= float(done.out) <= most, done
