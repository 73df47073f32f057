"""Is what is said of a run what its files and the queue say?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from paceline.cluster.registry import identify
from paceline.cluster.slurm import QueuedJob
from paceline.events import Evaluated, RunEnded, RunFailed, RunStopped
from paceline.hang.judge import judge
from paceline.hang.proc import process
from paceline.hang.rank_report import current_report, read_reports, write_report
from paceline.hang.verdict import HangVerdict, write_verdict
from paceline.launch.failure import Failure
from paceline.launch.restart import Restarts, launch_with_restarts
from paceline.launch.spec import LaunchSpec, Program
from paceline.report.dashboard import lines_of
from paceline.report.find_run import NamedRun
from paceline.report.history import History
from paceline.report.jobs import UNKNOWN, RunJob, with_queue_state
from paceline.report.jobs_table import is_current, print_jobs, status_of
from paceline.report.runs import summarize
from paceline.report.runs_table import print_runs
from paceline.report.state import RunState, RunWatcher, state_of
from paceline.rundir import RunDir, make_private
from paceline.telemetry.pulse import Pulse
from paceline.world.world import World
from support.run_folders import (
    holding,
    make_run,
    put_beat,
    squeue_line,
    started,
    submission,
    trained,
)  # fmt: skip

RUNNING = RunJob("17", "RUNNING", "", "", "10:00", "1:00", 1, "n1")
PENDING = RunJob("18", "PENDING", "", "Resources", "0:00", "1:00:00", 2)
DONE = RunJob("16", "COMPLETED", "")
IMPORTED = time.time()
AN_HOUR_AGO = IMPORTED - 3600
AHEAD = IMPORTED + 600  # a clock that is ahead


def state(folder, *jobs: RunJob) -> RunState:
    history = History(folder.events)
    history.read()
    return state_of(NamedRun(folder, ()), history, jobs)


@pytest.mark.parametrize(
    ("events", "jobs", "phase", "over"),
    [
        ([], [], "not started", True),
        ([], [PENDING], "waiting", False),
        ([], [RUNNING], "starting", False),
        ([started()], [RUNNING, PENDING], "training", False),
        ([started(time_s=AN_HOUR_AGO)], [RUNNING], "starting", False),  # it was killed, and is requeued
        ([started(), RunStopped(3, "SIGTERM")], [RUNNING], "starting", False),
        ([started(), RunStopped(3, "SIGTERM")], [PENDING], "waiting", False),
        ([started(), RunStopped(3, "SIGTERM", time_s=AHEAD)], [DONE], "stopped", False),  # it may be continued at once
        ([started(time_s=AN_HOUR_AGO), RunStopped(3, "x", time_s=AN_HOUR_AGO)], [DONE], "stopped", True),
        ([started(time_s=AN_HOUR_AGO), RunFailed(3, 1, "x", time_s=AN_HOUR_AGO)], [], "failed", True),
        ([started(time_s=AN_HOUR_AGO)], [], "lost", True),
        ([started()], [replace(RUNNING, state="SUSPENDED")], "suspended", False),
        ([started(time_s=AN_HOUR_AGO)], [RunJob("17", UNKNOWN, "")], "lost", False),
        ([started(), RunEnded(9, 1.0, "d")], [RUNNING], "ended", False),
        ([started(), RunEnded(9, 1.0, "d")], [DONE], "ended", True),
        ([started(), RunFailed(3, 1, "x"), started(3)], [RUNNING], "training", False),
    ],
)  # fmt: skip
def test_where_a_run_stands(tmp_path: Path, events, jobs, phase: str, over: bool) -> None:
    late_s = time.time() - IMPORTED  # the events were made then
    fresh = [replace(event, time_s=event.time_s + late_s) for event in events]
    found = state(make_run(tmp_path / "run", *fresh), *jobs)
    assert (found.phase, found.over) == (phase, over)


def test_a_run_without_a_job_lives_while_its_lock_is_held_or_its_beats_are_fresh(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", started(time_s=AN_HOUR_AGO))
    with holding(folder.lock):
        assert state(folder).phase == "training"
    assert state(folder).phase == "lost"
    put_beat(folder, 1)
    assert state(folder).phase == "training"


def test_a_failed_run_is_not_over_while_its_launcher_restarts_it(tmp_path: Path) -> None:
    ago = {"time_s": AN_HOUR_AGO}
    folder = make_run(tmp_path / "run", started(**ago), RunFailed(3, 1, "killed by SIGKILL", **ago))
    phases = []

    def begin(*_, **__) -> Failure:
        found = state(folder)
        phases.append((found.phase, found.over, found.reason))
        return Failure(1, 137, "killed", progress=2, run=str(folder.root))

    spec = LaunchSpec(Program("x.py", ("path", "x.py")), 2)
    launch_with_restarts(spec, Restarts(1), None, print, begin)
    phases.append((state(folder).phase, state(folder).over, state(folder).reason))
    reason = "killed by SIGKILL"
    failed = ("failed", True, reason)
    assert phases == [failed, ("starting", False, reason), failed]


def test_a_script_without_events_is_judged_by_its_launches(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.launches.write_text('{"event": "launched"}\n')
    with holding(folder.launch_lock):
        assert state(folder).phase == "training"
    assert state(folder).phase == "lost"
    for codes, phase in (("[0, 0]", "ended"), ("[0, -9]", "failed"), ("7", "lost")):
        folder.launches.write_text(f'{{"event": "ended", "codes": {codes}}}\n')
        assert state(folder).phase == phase


def test_events_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", started())
    os.truncate(folder.events, 1 << 40)
    assert "events.jsonl: it has 1,099,511,627,776 bytes" in state(folder).reason
    (damaged,) = summarize([folder.root])
    assert damaged.damage == state(folder).reason


def test_step_loss_speed_and_time_left(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / "run", started(), *trained(1, 201), started(101), *trained(111, 401)
    )
    put_beat(folder, 0, step=409)
    put_beat(folder, 7, step=900)  # of an earlier, larger world
    found = state(folder, RUNNING)
    assert (found.step, found.total_steps, found.restarts, found.world_size) == (409, 1000, 1, 2)
    assert found.loss == pytest.approx(100 / 401)
    assert found.left_s == pytest.approx((1000 - 409) * 32 / 640)
    assert (found.checkpoint.step, found.checkpoint.size_bytes) == (401, 2_000_000)
    assert list(found.losses) == [100 / n for n in [*range(1, 102, 10), *range(111, 402, 10)]]


@pytest.mark.parametrize(
    ("own_s", "rank"),
    [
        ([0.25, 0.1, 0.1], None),  # of 2, 1 and 1 lanes
        ([0.1, 0.1, 0.1, 0.2], 3),
        ([0.1, 0.11, 0.1, 0.119], None),  # within what chance does
        ([0.3, 0.1, 0.11, 0.2], 0),
    ],
)
def test_the_slowest_rank_is_named_if_it_is_clearly_slower(
    tmp_path: Path, own_s: list[float], rank
) -> None:
    ranks = len(own_s)
    folder = make_run(tmp_path / "run", started(ranks=ranks, time_s=time.time() - 9))
    for number, seconds in enumerate(own_s):
        put_beat(folder, number, own_s=seconds)
    found = state(folder, RUNNING)
    assert (found.slowest.beat.rank if found.slowest else None) == rank
    said = "\n".join(lines_of(found, 200, 50))
    assert (f"ranks  {ranks} on cpu; rank {rank} " in said) == (rank is not None)


def test_a_damaged_beat_and_one_from_before_the_start_say_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", started())
    put_beat(folder, 0, step=777, time_s=AN_HOUR_AGO)
    put_beat(folder, 1, step=3, time_s=time.time() + 1)
    folder.beat(2).write_text("{")
    folder.beat(3).write_text('{"rank": 0}')
    found = state(folder, RUNNING)
    assert (found.step, found.ranks_seen) == (3, 1)


def test_what_holds_a_run_up_is_shown_while_it_does(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", started(time_s=AN_HOUR_AGO), Evaluated(4, {"acc": 0.25}))
    make_private(folder.hang_verdict.parent)
    sentence = "rank 1 is in f at x.py:3; rank 0 waits for it"
    write_verdict(folder, HangVerdict("own code", (1,), (0,), sentence))
    with holding(folder.lock):
        found = state(folder)
    facts = {"cause": "own code", "ranks": [1], "waiting": [0], "sentence": sentence}
    assert found.facts()["hang"] == facts
    lines = lines_of(found, 200, 50)
    assert {f"hang   {sentence}", "eval   acc 0.2500 (step 4)"} <= set(lines)
    assert f"before {sentence}" in lines_of(state(folder), 200, 50)
    folder.hang_verdict.unlink()
    assert state(folder).hang is None


def test_a_run_whose_ranks_the_kernel_has_stopped_is_suspended(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", started(time_s=AN_HOUR_AGO))
    with subprocess.Popen(["sleep", "60"]) as rank, holding(folder.lock):
        report = replace(current_report(World(), Pulse(3.0), "running"), process=process(rank.pid))
        write_report(folder, report)
        assert (state(folder).phase, judge([report]).cause) == ("training", "none")
        rank.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
        found = state(folder)
        assert found.phase == "suspended"
        assert found.reason.endswith(f"kill -CONT {rank.pid}")
        assert judge(read_reports(folder)).cause == "stopped"
        rank.kill()


def test_the_processes_of_the_ranks_are_named_while_they_run_here(tmp_path: Path, capsys) -> None:
    folder = make_run(tmp_path / "run", started(time_s=AN_HOUR_AGO))
    size = state(folder).world_size
    with subprocess.Popen(["sleep", "60"]) as rank, holding(folder.lock):
        for number in range(size):
            report = current_report(World(rank=number, size=size), Pulse(3.0), "running")
            write_report(folder, replace(report, process=process(rank.pid)))
        assert state(folder).pids == (rank.pid,) * size
        assert f"\npids   rank 0: {rank.pid}" in "\n".join(lines_of(state(folder)))
        print_runs(summarize([folder.root]))
        assert f"\nrun: processes rank 0: {rank.pid}" in capsys.readouterr().out
        rank.kill()
        rank.wait()
        assert state(folder).pids == ()


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 60), st.text(), st.lists(st.text(), max_size=12))
def test_a_frame_fits_its_terminal_whatever_a_log_says(
    width: int, height: int, name: str, log: list[str]
) -> None:
    found = RunState(
        name, f"/{name}", "failed", name, (RUNNING, PENDING), name, 2, "cuda:0", 3, 5, 10, 0.5, (3.0, 0.5),
        {name: 0.5}, 5, 9.0, 8.0, None, None, HangVerdict("stuck", (1,), (0,), name), 2, (7, 8), "/log", tuple(log), 4.0,
    )  # fmt: skip
    lines = lines_of(found, width, height)
    assert len(lines) <= height
    assert max(map(cell_len, lines), default=0) <= width
    assert not {"\x1b", "\n"} & set("".join(lines))


def test_the_state_is_json_with_null_for_what_is_no_number(tmp_path: Path) -> None:
    facts = state(make_run(tmp_path / "run"), PENDING).facts()
    facts = json.loads(json.dumps(facts, allow_nan=False))
    assert [facts[name] for name in ("phase", "loss", "left_s")] == ["waiting", None, None]
    assert facts["jobs"][0]["reason"] == "Resources"


def test_slurm_that_does_not_answer_does_not_end_the_watch(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = make_run(tmp_path / "run", started(), *trained(1, 51))
    found = RunWatcher(NamedRun(folder, (submission("17", folder.root),))).look()
    assert "there is no Slurm on this machine" in found.queue_problem
    assert (found.jobs[0].state, found.step, found.over) == ("UNKNOWN", 51, False)


@pytest.mark.parametrize("slurm", ["NODE_FAIL", "OUT_OF_MEMORY"])
def test_what_slurm_knows_is_shown_instead_of_a_lost_connection(tmp_path: Path, slurm: str) -> None:
    symptom = RunFailed(3, -1, "a rank ended, and the others lost the connection to it")
    folder = make_run(tmp_path / "run", started(), symptom)
    found = state(folder, replace(DONE, state=slurm))
    assert (found.phase, found.reason) == ("failed", f"Slurm: job 16 is {slurm}")
    assert state(folder, replace(DONE, state="FAILED")).reason == symptom.reason


def test_a_job_that_could_not_be_launched_is_explained(tmp_path: Path, capsys) -> None:
    sent = submission("17", make_run(tmp_path / "run").root)
    line = squeue_line("17", "FAILED", "run", reason="JobLaunchFailure")
    held = squeue_line("17", "PENDING", "run", reason="launch_failed_requeued_held")

    def shown(line: str) -> str:
        [known] = identify([sent], [QueuedJob.read(line)], {})
        found = state(RunDir(tmp_path / "run"), with_queue_state(known))
        print_jobs([found])
        return "\n".join([*lines_of(found), capsys.readouterr().out])

    assert shown(line).count(f"Slurm could not open the log: {tmp_path}/run/jobs does not exist") == 2  # fmt: skip
    (tmp_path / "run" / "jobs").mkdir()
    assert shown(line).count("is probably not on its first node, or not writable there") == 2
    assert "state  failed" in shown(line)
    assert "`scontrol release 17`" in shown(held)
    (tmp_path / "run" / "jobs" / "over").write_text("failed with exit code 3, /x is not on n2\n")
    found = state(RunDir(tmp_path / "run"), RunJob("17", "GONE", ""))
    assert (found.phase, found.reason) == ("failed", "exit code 3, /x is not on n2")


def test_one_row_for_a_run_across_its_jobs(tmp_path: Path, capsys) -> None:
    folder = make_run(tmp_path / "my run", started(), *trained(1, 101), started(101))
    sent = [submission(job, folder.root) for job in ("16", "17", "18", "19")]
    shown = [squeue_line("17", "RUNNING", "my run")]
    shown += [squeue_line(job, "PENDING", "my run", reason="Dependency") for job in ("18", "19")]
    known = identify(sent, [QueuedJob.read(line) for line in shown], {})
    found = state(folder, *map(with_queue_state, known))
    print_jobs([found])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "jobs", "state", "step", "loss", "used", "left", "starts", "log"]
    cells = "my run  17,18,19  RUNNING, 2 more waiting  101/1,000  0.9901  0:10  59:50  2  "
    assert row.startswith(cells)
    assert row.endswith("jobs/17.log")
    assert is_current(found)


ENDED, FAILED, STOPPED = RunEnded(9, 1.0, "d"), RunFailed(9, 0, "x"), RunStopped(9, "x")


@pytest.mark.parametrize(
    ("ending", "job", "said"),
    [
        ([ENDED], "GONE", "finished"),
        ([FAILED], "FAILED", "failed"),
        ([STOPPED], "CANCELLED", "stopped"),
        ([], "TIMEOUT", "timeout"),
        ([], "GONE", "lost"),
    ],
)
def test_a_run_whose_jobs_are_gone_is_as_its_events_tell(
    tmp_path: Path, ending, job: str, said: str
) -> None:
    folder = make_run(tmp_path / "run", started(time_s=AN_HOUR_AGO), *ending)
    assert status_of(state(folder, RunJob("1", job, ""))) == said
