"""Does the report say what became of a run, why it restarted, and what share of its time was useful?"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.events import CheckpointSaved, Event, RunEnded, RunFailed, RunStopped, StepDone
from paceline.report.find_run import NamedRun
from paceline.report.page.document import render_page
from paceline.report.page.page_data import report_data
from paceline.train.observers.environment import git_state
from support import run_folders as runs

KILLED = "rank 1 (node n1) was killed (SIGKILL), in step 31"


def steps(first: int, last: int, begun_s: float) -> list[Event]:
    """One step per second of 32 samples, with an event every 10 steps."""
    return [
        StepDone(n, 1, n * 32, 1.0, 0.1, 32.0, time_s=begun_s + n - first + 1)
        for n in range(first, last + 1)
        if n % 10 == 0
    ]


def facts(root: Path, *events: Event) -> dict:
    folder = runs.make_run(root / "runs" / "run", *events)
    return report_data([NamedRun(folder, ())])["runs"][0]


def killed_once() -> list[Event]:
    """Steps 1 to 30; the death is noted after 2 s, the restart takes 8 s more, and repeats 10 steps."""
    return [
        runs.started(time_s=1000.0),
        *steps(1, 30, 1000.0),
        RunFailed(30, -1, "a rank ended", time_s=1031.0),
        RunFailed(30, 1, KILLED, time_s=1032.0),
        runs.started(20, time_s=1040.0),
        *steps(21, 60, 1042.0),
    ]


def test_goodput_is_the_share_of_the_wall_time_in_steps_that_count(tmp_path: Path) -> None:
    run = facts(tmp_path, *killed_once(), RunEnded(60, 44.0, "ab", time_s=1084.0))
    assert run["goodput"] == pytest.approx(
        {"wall_s": 84, "useful_s": 60, "repeated_s": 10, "down_s": 10, "other_s": 4, "goodput": 60 / 84}
    )  # fmt: skip
    assert [restart["cause"] for restart in run["restarts_because"]] == [KILLED]
    for words in ("60 steps", "1 min 24 s", "1 restart (rank 1 was killed", "10 steps", "71%"):
        assert words in run["verdict"]


def test_a_pause_after_a_requested_stop_does_not_count(tmp_path: Path) -> None:
    stop = [CheckpointSaved(30, "there", 9, time_s=1030.0), RunStopped(30, "the time limit", time_s=1030.0)]  # fmt: skip
    events = [runs.started(time_s=1000.0), *steps(1, 30, 1000.0), *stop]
    run = facts(tmp_path, *events, runs.started(30, time_s=9000.0), *steps(31, 60, 9000.0))
    assert run["goodput"]["wall_s"] == pytest.approx(60)
    assert run["verdict"].startswith("Ended without a message after step 60 of 1,000")
    assert run["goodput"]["goodput"] == pytest.approx(1.0)
    assert "1 restart (the time limit)" in run["verdict"]


def test_a_start_that_ended_without_a_message_is_said_to_have(tmp_path: Path) -> None:
    events = [runs.started(time_s=1000.0), *steps(1, 30, 1000.0), runs.started(20, time_s=1040.0)]
    run = facts(tmp_path, *events)
    assert run["restarts_because"][0]["cause"].startswith("it ended without a message")
    assert run["restarts_because"][0]["down_s"] == pytest.approx(10)


def test_the_failure_page_is_a_section_and_its_text_is_text(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path / "runs" / "run", *killed_once()[:6])
    code = 'File "x.py", line 3\n      raise <b>oops</b> # token=hush'
    folder.failure.write_text(f"# run failed\n\nrank 1 was killed.\n\n## Traceback\n\n    {code}\n")
    facts_of_it = report_data([NamedRun(folder, ())])
    words = "Failed after step 30 of 1,000 and 30 s (rank 1 was killed, SIGKILL)"
    assert facts_of_it["runs"][0]["verdict"].startswith(words)
    page = render_page(facts_of_it).decode()
    assert "<h2>Failure</h2>" in page
    assert "\n  raise &lt;b&gt;oops&lt;/b&gt; # token=[removed]</pre>" in page
    folder.failure.unlink()
    folder.failure.symlink_to(folder.events)
    assert "<h2>Failure</h2>" not in render_page(report_data([NamedRun(folder, ())])).decode()


def test_the_origin_of_a_run_is_named(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path / "runs" / "run", runs.started(time_s=0.0))
    folder.environment.write_text(
        '{"command": "paceline run x.py hub_token=hush", "git": {"commit": "0123456789abcdef", "clean": false},'
        ' "machine": {"host": "n7", "cpu": "Cortex", "cores": 4, "gpu": "H200", "gpus": 8}}'
    )
    page = render_page(report_data([NamedRun(folder, ())])).decode()
    for words in (
        "paceline run x.py hub_token=[removed]", "0123456789ab (with uncommitted changes)", "1970-01-01 00:00 UTC",
        "n7", "Cortex (4 cores)", "H200 (8 visible)",
    ):  # fmt: skip
        assert f"<dd>{words}</dd>" in page


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_of_a_script_and_whether_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        setting = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(tmp_path), *setting, *words], check=True, capture_output=True, text=True)  # fmt: skip
        return done.stdout.strip()

    script, new, copy = (tmp_path / name for name in ("train.py", "new.py", "runs/copy.py"))
    assert git_state(script) == {}
    git("init")
    script.write_text("1")
    (tmp_path / ".gitignore").write_text("runs\n")
    assert git_state(script) == {}  # no commit yet
    git("add", ".")
    git("commit", "-m", "x")
    clean = {"commit": git("rev-parse", "HEAD"), "clean": True}
    assert git_state(script) == clean
    assert git_state(new) == {}
    new.write_text("2")
    assert git_state(new) == clean | {"clean": False}
    assert git_state(script) == clean
    script.write_text("3")
    assert git_state(script) == clean | {"clean": False}
    copy.parent.mkdir()
    copy.write_text("4")
    assert git_state(copy) == {}
