"""The doctor examines this machine, also where it is broken."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import pytest

from paceline.doctor.disk import probe_disk
from paceline.doctor.gpu import judge_gpus, query_driver
from paceline.doctor.network import gather_network, judge_network
from paceline.doctor.resources import gather_resources
from paceline.doctor.software import query_torch, versions
from support.program import paceline

CHECKS = [
    "python", "torch", "backends", "gpus", "cores", "ulimit files", "shared memory", "memory", "interface", "host name", "ports", "disk",
]  # fmt: skip


def test_this_machine_is_looked_at_and_nothing_is_left(tmp_path: Path):
    done = paceline("doctor", "--json", folder=tmp_path)
    said = json.loads(done.out)
    assert list(said) == ["ok", "hosts", "ranks", "findings"]
    assert (said["hosts"], said["ranks"]) == (1, 1)
    assert done.code == (0 if said["ok"] else 1)
    found = {one["check"]: one for one in said["findings"]}
    assert [name for name in CHECKS if name not in found] == []
    keys = {"check", "ok", "says", "fix", "line", "hosts"}
    assert all(set(one) == keys for one in said["findings"])
    assert all(bool(one["fix"]) != one["ok"] for one in said["findings"])
    assert "gloo" in found["backends"]["says"]
    assert [file.name for file in tmp_path.rglob("*")] == ["tmp"]  # which the test made


def test_each_check_is_a_line_and_a_problem_has_its_fix_below(tmp_path: Path):
    done = paceline("doctor", "--quick", "-n", "10000", folder=tmp_path)
    lines = done.out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("problem  cores"))
    assert (done.code, done.err) == (1, "")
    assert lines[place + 1].strip().startswith("fix: start at most")
    assert not any(line.split()[1] == "torch" for line in lines if line)


BROKEN = {
    "an error": (
        "raise ImportError('libcudart.so.13: cannot open shared object file')",
        "libcudart.so.13: cannot open",
    ),
    "a crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
    "a hang": ("import time; time.sleep(60)", "no answer within 2 s"),
    "something else": ("print('hello'); raise SystemExit(0)", "unexpected output"),
}


def test_a_broken_torch_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for text, says in BROKEN.values():
        (tmp_path / "torch" / "__init__.py").write_text(text)
        assert says in query_torch(2 if "sleep" in text else 90).failure


def test_a_driver_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for text in ("echo 'NVIDIA-SMI has failed'; exit 9", "exit 9"):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        (found,) = judge_gpus(query_driver(), None, None)
        assert not found.ok
        assert "nvidia-smi fails" in found.says


def test_the_facts_are_those_of_this_process(tmp_path: Path):
    host = gather_resources()
    assert host.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert host.memory > 0 < host.shared_memory_all
    assert versions()["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    disk = probe_disk(tmp_path / "not" / "yet")
    assert (disk.refusal, disk.speed > 0, disk.fsync_s > 0, disk.free > 0) == ("", True, True, True)
    assert disk.kind


V1 = "9:name=systemd:/\n4:memory:/slurm/job_1/step_0\n2:cpu,cpuacct:/slurm/job_1\n0::/\n"
GROUPS = {
    "v2": ("0::/system.slice/job_1/step_0\n", {"": "", "system.slice/job_1/cpu.max": "150000 100000", "system.slice/job_1/memory.max": "4096000", "system.slice/job_1/step_0/memory.max": "max", "system.slice/memory.max": "8192000"}),
    "v1": (V1, {"memory/slurm/job_1/memory.limit_in_bytes": "4096000", "memory/slurm/job_1/step_0/memory.limit_in_bytes": "9223372036854771712", "cpu,cpuacct/slurm/job_1/cpu.cfs_quota_us": "150000", "cpu,cpuacct/slurm/job_1/cpu.cfs_period_us": "100000", "cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}),
    "a container that sees its own group at the top": ("0::/docker/1\n", {"memory.max": "4096000", "cpu.max": "150000 100000"}),
    "a container in a group beside": ("0::/../other\n", {"memory.max": "4096000", "cpu.max": "150000 100000"}),
}  # fmt: skip


@pytest.mark.parametrize(("told", "files"), GROUPS.values(), ids=GROUPS)
def test_the_least_limit_of_the_groups_above_counts(
    tmp_path: Path, told: str, files: dict[str, str]
):
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name:
            path.write_text(f"{text}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(told)
    host = gather_resources(tmp_path)
    assert (host.memory, host.quota, host.shared_memory_all) == (4096000, 1.5, 0)


def test_a_machine_without_groups_and_affinity_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(os, "sched_getaffinity")
    host = gather_resources(tmp_path)
    assert (len(host.cores), host.quota) == (os.cpu_count(), 0.0)


def test_the_soft_limit_of_open_files_counts():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    try:
        assert gather_resources().open_files == before[0] - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_folder_that_cannot_be_written_is_a_finding(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert probe_disk(tmp_path / "file" / "runs").refusal == "Not a directory"


def test_a_port_that_is_taken_and_an_interface_that_is_not_there_are_found():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {"PACELINE_INTERFACE": "lo", "MASTER_PORT": str(taken.getsockname()[1])}
        network = gather_network(env)
    assert network.chosen == "127.0.0.1"
    assert "in use" in network.taken
    env = {"PACELINE_INTERFACE": "nope0"}
    found = {one.check: one for one in judge_network(gather_network(env), env, alone=False)}
    assert "nope0" in found["interface"].says


def test_a_batch_script_is_read_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from paceline.cli.main import run_verb

    monkeypatch.chdir(tmp_path)
    bad = "#!/bin/bash\n#SBATCH -N 2\ntouch ran\nsrun torchrun --nnodes 2 \x1b[31mtrain.py\nRANK=\x1b[31m$SLURM_PROCID srun -n4 python x\n"
    (tmp_path / "bad.sh").write_text(bad)
    (tmp_path / "good.sh").write_text("#!/bin/bash\npaceline run train.py\n")
    (tmp_path / "long.sh").write_text(
        f"#!/bin/bash\n#{'x' * 100_000}\n#SBATCH -N 2\nsrun torchrun --nnodes 2 x.py\n"
    )
    assert run_verb(["doctor", "bad.sh"]) == 1
    said = capsys.readouterr().out
    assert "problem  no-rendezvous" in said and "line 4: 2 nodes" in said and "\x1b" not in said
    assert run_verb(["doctor", "bad.sh", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (list(told), told["ok"]) == (["ok", "script", "findings"], False)
    assert {one["line"] for one in told["findings"]} == {4, 5}
    assert run_verb(["doctor", "long.sh"]) == 1
    assert "line 4: 2 nodes" in capsys.readouterr().out
    assert run_verb(["doctor", "good.sh"]) == 0
    assert capsys.readouterr().out == "ok       good.sh: no known mistake in 2 lines\n"
    assert not (tmp_path / "ran").exists()
