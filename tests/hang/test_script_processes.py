"""`paceline hang` on scripts that report nothing: their processes, their logs, and their failure."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from paceline.hang.script_processes import judge_script, script_reports
from paceline.rundir import RunDir
from support.program import Done, paceline, started, wait_until

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
    assert calm.code == 0
    assert "the script does not use Paceline, so its progress is unknown" in calm.out
    assert f"process {pids[0]} is sleeping" in calm.out
    assert (stopped.code, stopped.out.splitlines()[0]) == (1, "rank 1: the process is stopped")


def test_the_failure_of_a_foreign_script_is_shown_afterwards(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(SLEEPS)
    assert paceline("run", "any.py", "fail", folder=tmp_path, cold=True).code == 1
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
