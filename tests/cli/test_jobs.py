"""Are my jobs listed as runs, and ended in the right order? With stand-ins for Slurm's commands; tests/slurm has the real ones."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from pathlib import Path

import pytest

from paceline.cluster.registry import register
from paceline.events import RunEnded
from paceline.rundir import RunDir
from support import run_folders as runs
from support.program import Done, paceline

SQUEUE = """#!/bin/sh
case "$*" in
*--Format=*) echo '17  2030-01-01T10:00:00  2'; echo '18  N/A  0' ;;
*) cat "${0%/*}/queue" ;;
esac
"""
SCANCEL = """#!/bin/sh
echo "$*" "$(ls chain/run/jobs)" >> "$LOG"
"""


@pytest.fixture
def chain(tmp_path: Path, monkeypatch) -> Path:
    """A run with a job that runs, one that waits for it, and one that is over."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = runs.make_run(tmp_path / "chain" / "run", runs.started(), *runs.trained(1, 101))
    for job in ("16", "17", "18"):
        register(runs.submission(job, folder.root))
    return folder.root


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A folder with stand-ins for Slurm's commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"squeue": SQUEUE, "scancel": SCANCEL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o700)
    put_in_queue(
        commands,
        runs.squeue_line("17", "RUNNING", "run"),
        runs.squeue_line("18", "PENDING", "run", reason="Dependency"),
    )
    return f"{commands}:/usr/bin:/bin"


def put_in_queue(commands: Path, *lines: str) -> None:
    (commands / "queue").write_text("".join(f"{line}\n" for line in lines))


def run(tmp_path: Path, *words: str, path: str) -> Done:
    return paceline(*words, folder=tmp_path, env={"PATH": path, "LOG": str(tmp_path / "told")})


def test_a_chain_is_one_line(tmp_path: Path, chain: Path, path: str) -> None:
    done = run(tmp_path, "jobs", path=path)
    assert (done.code, done.err) == (0, "")
    _, line = done.out.splitlines()
    cells = re.split(r"\s{2,}", line)
    assert cells[:5] == ["run", "17,18", "RUNNING, 1 more waiting", "101/1,000", "0.9901"]
    assert cells[5:] == ["0:10", "59:50", "1", str(chain / "jobs" / "17.log")]
    [facts] = json.loads(run(tmp_path, "jobs", "--json", path=path).out)["runs"]
    assert [(job["job"], job["state"], job["requeues"]) for job in facts["jobs"]] == [("16", "GONE", 0), ("17", "RUNNING", 2), ("18", "PENDING", 0)]  # fmt: skip


def test_runs_that_are_over_are_listed_for_a_day(tmp_path: Path, chain: Path, path: str) -> None:
    old = time.time() - 90_000
    for name, when in (("old", old), ("new", time.time())):
        folder = runs.make_run(
            tmp_path / name, runs.started(time_s=when), RunEnded(9, 1.0, "d", time_s=when)
        )
        register(runs.submission(f"9{name}", folder.root, time_s=when))
    assert [line.split()[0] for line in run(tmp_path, "jobs", path=path).out.splitlines()] == [
        "run",
        "run",
        "new",
    ]
    out = run(tmp_path, "jobs", "--all", path=path).out
    assert [line.split()[0] for line in out.splitlines()] == ["run", "run", "old", "new"]
    assert "  9new   finished " in out


def test_no_jobs_at_all(tmp_path: Path, monkeypatch, path: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = run(tmp_path, "jobs", path=path)
    assert (done.code, done.err) == (0, "")
    assert "paceline submit" in done.out


def test_without_slurm_that_is_said(tmp_path: Path, chain: Path) -> None:
    for words in (["jobs"], ["cancel", "17"]):
        done = run(tmp_path, *words, path=str(tmp_path))
        assert (done.code, done.out) == (3, "")
        assert "there is no Slurm on this machine" in done.err
        assert "  fix: " in done.err


@pytest.mark.parametrize("word", ["run", "16", "chain/run"])
def test_cancel_ends_those_that_wait_first_and_forbids_a_requeue_before(
    tmp_path, chain: Path, path: str, word
) -> None:
    done = run(tmp_path, "cancel", word, path=path)
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "told").read_text().splitlines() == [
        f"--user={os.getuid()} --name=run {job} cancelled" for job in ("18", "17")
    ]
    assert stat.S_IMODE((chain / "jobs" / "cancelled").stat().st_mode) == 0o600
    assert "job 18 was queued and will not start\njob 17 was asked to save and exit" in done.out
    facts = json.loads(run(tmp_path, "cancel", word, "--json", path=path).out)
    assert facts["cancelled"] == {"waiting": ["18"], "running": ["17"]}


def test_a_job_of_another_run_with_the_same_number_is_neither_shown_nor_cancelled(
    tmp_path: Path, chain: Path, path: str
) -> None:
    put_in_queue(
        tmp_path / "bin",
        runs.squeue_line("17", "RUNNING", "other"),
        runs.squeue_line("18", "PENDING", "run", submitted_s=time.time() + 86400),
    )
    assert "RUNNING" not in run(tmp_path, "jobs", path=path).out
    assert "job    18  has left the queue" in run(tmp_path, "watch", "run", path=path).out
    done = run(tmp_path, "cancel", "17", path=path)
    assert (done.code, done.out) == (0, "run has no job in the queue: there is nothing to cancel\n")
    assert not (tmp_path / "told").exists()


def test_runs_are_listed_from_their_files_while_slurm_does_not_answer(
    tmp_path: Path, chain: Path, path: str
) -> None:
    runs.put_beat(RunDir(chain), 0, step=109)
    (tmp_path / "bin" / "squeue").write_text(
        "#!/bin/sh\necho 'squeue: error: Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    done = run(tmp_path, "jobs", path=path)
    assert done.code == 0
    assert re.split(r"\s{2,}", done.out.splitlines()[1])[:4] == [
        "run",
        "16,17,18",
        "training (by its files)",
        "109/1,000",
    ]
    assert "Slurm does not answer: squeue failed: Socket timed out" in done.err
    [facts] = json.loads(run(tmp_path, "jobs", "--json", path=path).out)["runs"]
    assert (facts["phase"], facts["step"]) == ("training", 109)
    assert "Socket timed out" in facts["queue_problem"]
    done = run(tmp_path, "cancel", "17", path=path)
    assert (done.code, "try again in a minute" in done.err) == (3, True)


def test_nothing_is_cancelled_where_nothing_is_queued(
    tmp_path: Path, chain: Path, path: str
) -> None:
    register(runs.submission("99", tmp_path / "chain" / "other"))
    done = run(tmp_path, "cancel", "other", path=path)
    assert (done.code, done.out) == (
        0,
        "other has no job in the queue: there is nothing to cancel\n",
    )
    assert not (tmp_path / "told").exists()
    assert not (tmp_path / "chain" / "other").exists()


def test_a_run_without_a_job_is_not_cancelled_but_the_way_is_told(
    tmp_path: Path, monkeypatch, path: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = runs.make_run(tmp_path / "runs" / "here", runs.started())
    with runs.holding(folder.lock):
        done = run(tmp_path, "cancel", "here", path=path)
    assert (done.code, done.out) == (1, "")
    assert "send SIGTERM to process 4711 on n1" in done.err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["cancel", "4444"], "use one of: 16, 17, 18, run"),
        (["cancel", "rum"], "did you mean run?"),
    ],
)
def test_bad_usage_is_refused(
    tmp_path: Path, chain: Path, path: str, words: list[str], fix: str
) -> None:
    done = run(tmp_path, *words, path=path)
    assert (done.code, done.out) == (2, "")
    assert fix in done.err
    assert not (tmp_path / "told").exists()
