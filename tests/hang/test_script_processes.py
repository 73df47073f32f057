"""`paceline hang` on scripts that report nothing: their processes, their logs, and their failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.hang.proc import process
from paceline.hang.rank_report import RankReport
from paceline.hang.script_dumps import LaunchedRank, _outside_reader, request_dumps
from paceline.hang.script_processes import SCRIPT, judge_script, script_reports
from paceline.hang.stacks import MAIN, CodeLine, Stack, kind_of
from paceline.rundir import RunDir
from support.program import Done, paceline, started, wait_for, wait_until

SLEEPS = """
import os, sys, time
from pathlib import Path
print("rank", os.environ["RANK"])
if "fail" in sys.argv:
    raise ValueError("bad sample 17")
while not Path("end").exists():
    time.sleep(0.05)
"""


def launches(folder: Path) -> list[dict[str, object]]:
    file = folder / "runs" / "any" / "launches.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ask(folder: Path) -> Done:
    """Ask while the run is alive: its temporary folder is still there."""
    with started("hang", "any", folder=folder, cold=True) as asking:
        return asking.wait()


def test_a_stopped_process_of_a_foreign_script_is_named(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(SLEEPS)
    logs = [tmp_path / "runs" / "any" / "ranks" / f"{rank:04d}.log" for rank in range(2)]
    with started("run", "-n", "2", "any.py", folder=tmp_path, cold=True) as running:
        wait_until(lambda: all(log.exists() for log in logs), "both ranks have printed")
        calm = ask(tmp_path)
        (pids,) = [event["pids"] for event in launches(tmp_path)]
        assert isinstance(pids, list)
        os.kill(pids[1], signal.SIGSTOP)
        stopped = ask(tmp_path)
        os.kill(pids[1], signal.SIGCONT)
        (tmp_path / "end").touch()
        assert running.wait().code == 0
    ended = ask(tmp_path)
    assert (ended.code, "has finished" in ended.out) == (0, True)
    assert calm.code == 0
    assert f"process {pids[0]} is sleeping" in calm.out
    assert stopped.code == 1
    assert stopped.out.startswith("rank 1: the process is stopped\n")


WAITS = """
import time
from pathlib import Path
import torch
import torch.distributed as dist

def sleep_until(name):
    while not Path(name).exists():
        time.sleep(0.05)

dist.init_process_group("gloo")
print("joined")
while not Path("end").exists():
    if dist.get_rank() == 1:
        time.sleep(0.02)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1 and Path("stick").exists():
        Path("stuck").touch()
        sleep_until("end")
"""


@pytest.mark.heavy
def test_the_rank_that_others_wait_for_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(WAITS)
    log = tmp_path / "runs" / "any" / "ranks" / "0001.log"
    with started("run", "-n", "2", "any.py", folder=tmp_path) as running:
        wait_for(log)
        trains = ask(tmp_path)
        (tmp_path / "stick").touch()
        wait_for(tmp_path / "stuck")
        hangs = ask(tmp_path)
        (tmp_path / "end").touch()
        running.wait()
    assert trains.code == 0, trains.out
    assert hangs.code == 1, hangs.out
    line = WAITS[: WAITS.index("time.sleep(0.05)")].count("\n") + 1
    sentence, *shown = hangs.out.splitlines()
    assert f"; it is in sleep_until at any.py:{line}; rank 0 waits for it; no rank" in sentence
    assert re.match(r"rank 1 \(node .*\) has not entered all-reduce \d+;", sentence)
    assert f"    sleep_until at any.py:{line}: time.sleep(0.05)" in shown
    assert len([each for each in shown if "dist.all_reduce(torch.ones(1))" in each]) == 1
    assert "rank_dump" not in hangs.out


@contextmanager
def started_rank(born: int = 0, dump: Path | None = None) -> Iterator[LaunchedRank]:
    with subprocess.Popen([sys.executable, "-c", "import time\ntime.sleep(600)"]) as running:
        try:
            state = process(running.pid)
            yield LaunchedRank(0, replace(state, born=born or state.born), dump)
        finally:
            running.kill()


@pytest.mark.parametrize("born", [0, 1], ids=["without a handler", "with a reused process id"])
def test_another_process_gets_no_signal(tmp_path: Path, born: int) -> None:
    (tmp_path / "rank.stacks").touch()
    with started_rank(born, tmp_path / "rank") as rank:
        assert request_dumps([rank]) == {}
        assert process(rank.process.pid).can_respond


@pytest.mark.skipif(not _outside_reader(), reason="needs py-spy")
def test_the_stack_of_another_interpreter_is_read_by_py_spy() -> None:
    with started_rank() as rank:
        wait_until(lambda: bool(request_dumps([rank])[0].stacks), "py-spy finds Python")
        (stack,) = request_dumps([rank])[0].stacks
    assert (stack.thread, stack.places[0].line, stack.places[0].kind) == (MAIN, 2, "user")


def at(rank: int, *places: tuple[str, int, str]) -> RankReport:
    lines = tuple(CodeLine(file, line, name, kind_of(file)) for file, line, name in places)
    stacks = (Stack(MAIN, lines),)
    return RankReport(rank, 3, "n", "running", 0.0, 0, SCRIPT, stacks=stacks)


def test_a_wait_that_torch_does_not_record_is_found_by_the_stacks() -> None:
    library = "/opt/env/lib/python3.12/site-packages/torch/distributed"
    call, wrapper = ("a.py", 9, "main"), (f"{library}/c10d_logger.py", 83, "wrapper")
    waits = (call, wrapper, (f"{library}/distributed_c10d.py", 5, "monitored_barrier"))
    verdict = judge_script([at(0, *waits), at(1, ("a.py", 7, "load")), at(2, *waits)])
    assert (verdict.ranks, verdict.waiting, verdict.cause) == ((1,), (0, 2), "own code")
    assert verdict.sentence == (
        "rank 1 (node n) is in load at a.py:7; "
        "ranks 0, 2 wait in monitored_barrier, called in main at a.py:9"
    )


def test_the_failure_of_a_foreign_script_is_shown_afterwards(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(SLEEPS)
    assert paceline("run", "any.py", "fail", folder=tmp_path).code == 1
    later = paceline("hang", "any", folder=tmp_path)
    assert later.code == 1
    assert "ValueError: bad sample 17" in later.out


def test_a_rank_that_never_printed_is_silent_since_its_start(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    begun = {"event": "launched", "time_s": time.time() - 100, "ranks": [0], "pids": [os.getpid()]}
    folder.launches.write_text(json.dumps(begun))
    (report,) = script_reports(folder)
    assert 100 <= report.quiet_s < 160
    assert "rank 0 has printed nothing for 1" in judge_script([report]).sentence


def test_a_forged_record_of_a_launch_empties_no_file(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGRTMIN + 10, print)\nprint(flush=True)\ntime.sleep(600)"
    other = tmp_path / "other.stacks"
    other.write_text("kept")
    folder = RunDir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as running:
        try:
            running.stdout.readline()
            forged = {"ranks": [0], "pids": [running.pid], "dumps": [str(other.with_suffix(""))]}
            folder.launches.write_text(json.dumps({"event": "launched", **forged}))
            (report,) = script_reports(folder)
        finally:
            running.kill()
    assert (other.read_text(), report.process.can_respond) == ("kept", True)


KEEPS_THE_GIL = """
import ctypes, os
from pathlib import Path
print("rank", os.environ["RANK"], flush=True)
library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
Path("stuck").touch()
library.pthread_mutex_lock(mutex)
"""


@pytest.mark.heavy
def test_a_rank_that_keeps_the_gil_in_native_code_is_found_by_the_signal(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(KEEPS_THE_GIL)
    with started("run", "any.py", folder=tmp_path, cold=True) as running:
        wait_for(tmp_path / "stuck")
        shown = ask(tmp_path)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait().code == 143
    assert "<module> at any.py:8: library.pthread_mutex_lock(mutex)" in shown.out, shown


BUSY_THREADS = """
import os, threading
from pathlib import Path

def work(depth):
    return depth and work(depth - 1)

def keep_working():
    while True:
        work(50)

for _ in range(3):
    threading.Thread(target=keep_working, daemon=True).start()
print("rank", os.environ["RANK"], flush=True)
while not Path("end").exists():
    work(50)
"""


@pytest.mark.heavy
def test_asking_does_not_end_a_rank_whose_threads_work(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(BUSY_THREADS)
    with started("run", "any.py", folder=tmp_path, cold=True) as running:
        wait_for(tmp_path / "runs" / "any" / "ranks" / "0000.log")
        shown = [ask(tmp_path) for _ in range(8)]
        (tmp_path / "end").touch()
        assert running.wait() == Done(0, "rank 0\n", "")
    assert all("MainThread" in each.out for each in shown), shown
