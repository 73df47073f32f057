"""Does one line start the right ranks on the right nodes, with the bits of one process alone?"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.submitting import SCRIPT, SHORT, Desk, digest

WHO = """
import json, os, sys
from pathlib import Path
names = ("SLURM_PROCID", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "SRUN_CPUS_PER_TASK", "SECRET_TOKEN")
Path(f"who-{os.environ['SLURM_PROCID']}").write_text(json.dumps({name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "host": os.uname().nodename, "cores": len(os.sched_getaffinity(0))}))
"""
NODES = ("--nodes", "2", "--gpus-per-node", "2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one process alone."""
    folder = tmp_path_factory.mktemp("alone")
    return digest(subprocess.check_output([sys.executable, SCRIPT, *SHORT], cwd=folder, text=True))


@pytest.mark.heavy  # test_requeue.py submits in `make test`
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2, cgroup=True)
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_both_schools_give_the_bits_of_one_process(slurm, launcher: str, alone: str) -> None:
    desk = Desk.on(slurm)
    job = desk.submit(*NODES, "--time", "5", "--launcher", launcher, "training.py", *SHORT)
    (desk.folder / "training.py").write_text("raise SystemExit('an edit after the submission')")
    facts = slurm.wait(job, timeout_s=240)
    log = desk.log("training", job)
    assert facts["JobState"] == "COMPLETED", log
    assert "4 ranks, 1 lane each" in log
    assert f"started by {'slurm' if launcher == 'srun' else launcher}" in log
    assert digest(log) == alone
    private(desk.folder / "runs")
    private(desk.folder / "state")
    assert list((desk.folder / "runs" / "training" / "meetings").iterdir()) == []


def private(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.heavy  # test_requeue.py submits in `make test`
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
@pytest.mark.parametrize(
    "slurm", [{}, {"cgroup": True}], ids=["linuxproc", "cgroup"], indirect=True
)
def test_every_word_arrives_and_no_rank_is_told_who_it_is_by_the_shell(slurm, request) -> None:
    desk = Desk.on(slurm, "cpus_per_rank = 2")
    name = 'it\'s $(touch pwned); ünï "q" %j & more'
    (desk.folder / "who am i.py").write_text(WHO)
    words = ["a b", "$(touch pwned)", "`touch pwned`", "; touch pwned", "line\nbreak", "quo'te\"s"]
    words += ["漢字", "-x", "*"]
    environment = {"RANK": "7", "SECRET_TOKEN": "not-in-a-file"}
    another = ["--python", sys.executable] if "cgroup" in request.node.callspec.id else []
    job = desk.submit(*another, *NODES, "who am i.py", f"name={name}", *words, env=environment)
    assert slurm.wait(job, timeout_s=240)["JobState"] == "COMPLETED", desk.log(name, job)
    found = {rank: json.loads((desk.folder / f"who-{rank}").read_text()) for rank in range(4)}
    assert [found[rank]["host"] for rank in range(4)] == ["n1", "n1", "n2", "n2"]
    for rank, facts in found.items():
        assert facts["argv"] == [f"name={name}", *words]
        assert (facts["RANK"], facts["SRUN_CPUS_PER_TASK"]) == (str(rank), "2")
        assert facts["OMP_NUM_THREADS"] == "1"
        # All of the node's: a rank takes the one of its local number.
        assert facts["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert facts["SECRET_TOKEN"] == "not-in-a-file"
    assert not (desk.folder / "pwned").exists()
    assert slurm.job(job)["JobName"] == name.split(maxsplit=1)[0] or name in str(slurm.job(job))
    for file in (desk.folder / "runs").rglob("*"):
        assert not file.is_file() or "not-in-a-file" not in file.read_text(errors="replace"), file


@pytest.mark.heavy  # test_requeue.py submits in `make test`
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
def test_a_run_that_is_in_the_queue_is_not_submitted_twice(slurm) -> None:
    desk = Desk.on(slurm)
    slurm.sbatch("--nodes=2", "--exclusive", "--wrap=sleep 60")
    first = desk.submit("training.py", *SHORT)
    second = desk.paceline("submit", "training.py", *SHORT)
    assert (second.code, f"`paceline cancel {first}` first" in second.err) == (2, True)
    assert desk.paceline("cancel", first).code == 0
    other = desk.paceline("submit", "--json", "training.py", *SHORT, "name=other")
    assert [job["run"] for job in json.loads(other.out)["jobs"]] == [
        str(desk.folder / "runs" / "other")
    ]
    desk.submit("training.py", *SHORT)


@pytest.mark.heavy  # test_requeue.py submits in `make test`
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
def test_what_slurm_refuses_is_said_with_a_fix(slurm) -> None:
    desk = Desk.on(slurm)
    for option, value in (("partition", "nowhere"), ("constraint", "gold"), ("gpus-per-node", "8")):
        done = desk.paceline("submit", "--cluster", "here", f"--{option}", value, "training.py")
        assert (done.code, f"--{option}" in done.err.partition("fix: ")[2]) == (3, True), done.err
    assert not list((desk.folder / "state").rglob("*"))


@pytest.mark.heavy  # test_requeue.py submits in `make test`
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
def test_inside_an_allocation_run_uses_all_its_nodes(slurm, alone: str) -> None:
    desk = Desk.on(slurm)
    run = shlex.join([sys.executable, "-m", "paceline", "run", "training.py", *SHORT])

    def type_in(*words: str):
        return slurm.run([*words], folder=desk.folder)

    done = type_in("salloc", "-N2", "--gpus-per-node=2", "sh", "-c", run)
    assert done.code == 0, done.err
    assert "4 ranks, 1 lane each" in done.out
    assert digest(done.out) == alone
    inner = f"{run} name=inner"
    done = type_in("srun", "-N2", "-n2", "-c1", "sh", "-c", inner)
    assert (done.code, "without srun" in done.err) == (2, True)
    (desk.folder / "plain.py").write_text("print('of nobody')\n")
    words = [sys.executable, "-m", "paceline", "run", "--stop-after", "1h", "plain.py"]
    done = type_in("salloc", "-N2", *words)
    assert (done.code, "of nobody" in done.out, "--stop-after" in done.err) == (2, False, True)
    assert not list(desk.folder.glob(".paceline-*"))


@pytest.mark.heavy  # test_requeue.py submits in `make test`
@pytest.mark.slurm(nodes=2, cpus=4, gpus=2)
def test_an_interactive_shell_on_a_node_starts_ranks_on_the_others(slurm, alone: str) -> None:
    desk = Desk.on(slurm)
    run = shlex.join([sys.executable, "-m", "paceline", "run", "-n", "1", "training.py", *SHORT])
    script = f"salloc -N2 srun -N1 -n1 sh -c {shlex.quote(run)}"
    done = slurm.run(["sh", "-c", script], folder=desk.folder, timeout_s=240)
    assert done.code == 0, done.err
    assert "2 ranks, 2 lanes each" in done.out
    assert digest(done.out) == alone


def test_without_slurm_it_is_said_within_seconds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "submit", "--time", "5", SCRIPT],
        cwd=tmp_path,
        env=os.environ | {"PATH": "/nowhere", "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "paceline run -n 2 SCRIPT" in done.stderr) == (3, True), done.stderr
