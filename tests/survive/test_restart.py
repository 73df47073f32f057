"""A run that crashes is restarted from its newest checkpoint and ends with the bits of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli.run import ranks_from
from paceline.errors import STOPPED, ConfigError
from paceline.launch.failure import Failure, ended_by
from paceline.launch.restart import Restarts, launch_with_restarts
from paceline.launch.spec import LaunchSpec, Program
from support.program import MARK, around, paceline, processes_with, started
from survive.conftest import SCRIPT, SHORT, digest, pid

SAVING = (*SHORT, "checkpoint.every=5steps")

CRASH_ONCE = """
import os, runpy
from pathlib import Path
from paceline.train.run_loop import RunLoop

def crash(self, note, save_or_stop=RunLoop._save_or_stop):
    save_or_stop(self, note)
    done = self.done
    times = Path(f"crashes-{done}")
    if os.environ["RANK"] == "1" and done in {int(word) for word in os.environ["CRASH_AT"].split()}:
        count = len(times.read_bytes()) if times.exists() else 0
        if count < int(os.environ.get("TIMES", "1")):
            times.write_bytes(b"x" * (count + 1))
            self._checkpoints._saver.wait()  # a save that has begun is there before this rank is gone
            {"raise": lambda: [][0], "kill": lambda: os.kill(os.getpid(), 9)}[os.environ.get("HOW", "kill")]()

RunLoop._save_or_stop = crash
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
"""


def run(folder: Path, *words: str, **env: str):
    (folder / "crash.py").write_text(CRASH_ONCE)
    return paceline(
        "run", *around("crash.py", words), *SAVING, folder=folder, env={"SCRIPT": SCRIPT, **env}
    )


@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=pytest.mark.heavy)])
def test_each_failure_after_progress_is_forgiven_however_many_there_are(tmp_path, untouched, how):
    done = run(tmp_path, "-n", "2", "--max-restarts", "1", CRASH_AT="7 22", HOW=how)
    assert done.code == 0, done
    assert digest(done.out) == untouched
    assert done.err.count("restarting on 2 ranks from the checkpoint of step ") == 2
    assert "resumes from step" not in done.err, "nobody has to type anything"
    assert done.err.count("(attempt 1 of 1 without progress)") == 2


def test_failures_without_progress_are_counted(tmp_path: Path) -> None:
    words = ("-n", "2", "--max-restarts", "2")
    done = run(tmp_path, *words, CRASH_AT="7", TIMES="99", SLOW_STEP="0.05")
    assert done.code == 137
    assert len((tmp_path / "crashes-7").read_bytes()) == 3
    assert done.err.count("restarting on") == 2


def test_without_a_checkpoint_nothing_is_started_again_unless_asked_for(tmp_path, untouched):
    done = run(tmp_path, "-n", "2", CRASH_AT="3")
    assert (done.code, done.err.count("restarting on")) == (137, 0)
    (tmp_path / "crashes-3").unlink()
    done = run(tmp_path, "-n", "2", "--max-restarts", "1", CRASH_AT="3")
    assert (done.code, digest(done.out)) == (0, untouched)
    assert "from where this launch began: it saved no checkpoint (attempt 1 of 1" in done.err


def test_a_run_can_go_on_with_fewer_ranks(tmp_path: Path, untouched: str) -> None:
    done = run(tmp_path, "-n", "1:2", "--max-restarts", "3", CRASH_AT="12", TIMES="99")
    assert done.code == 0, done
    assert digest(done.out) == untouched
    assert "restarting on 1 rank from the checkpoint of step 10" in done.err


def test_a_known_error_is_not_tried_again(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--max-restarts", "3", "batch.lanes=1", CRASH_AT="")
    assert (done.code, done.err.count("restarting on")) == (2, 0)


@pytest.mark.parametrize(
    ("most", "progress", "spent", "known", "code", "again"),
    [
        (None, -1, 1, False, 137, False),
        (None, 0, 1, False, 137, True),
        (None, 5, 3, False, 1, True),
        (None, 5, 4, False, 1, False),
        (0, 5, 1, False, 1, False),
        (2, -1, 2, False, 1, True),
        (2, -1, 3, False, 1, False),
        (9, 5, 1, True, 2, False),
    ],
)
def test_when_to_start_again(most, progress, spent, known, code, again) -> None:
    assert not Restarts(most).allow(Failure(0, code, "", progress=9, on_request=True), spent)
    assert (
        Restarts(most).allow(Failure(0, code, "", permanent=known, progress=progress), spent)
        is again
    )


def test_a_signal_during_a_restart_leaves_a_run_that_resumes() -> None:
    ends = iter([Failure(1, 137, "killed", progress=200), ended_by(signal.SIGTERM)])
    spec = LaunchSpec(Program("x.py", ("path", "x.py")), 2)
    failure = launch_with_restarts(spec, Restarts(), None, print, lambda *_, **__: next(ends))
    assert (failure.exit_code, failure.progress) == (STOPPED, 200)
    assert "checkpoint saved at step 200 (exit code 75)" in failure.message


def test_a_range_of_ranks_that_cannot_be_is_refused() -> None:
    for words in ("0:4", "5:4", "a:4", "2:", "x"):
        with pytest.raises(ConfigError) as caught:
            ranks_from(words)
        assert "-n 2:4" in caught.value.fix


def test_a_crashed_rank_is_noticed_by_the_others_within_seconds(tmp_path: Path) -> None:
    words = ("-n", "3", "--max-restarts", "0", *SHORT, "epochs=200", "timeout.step_s=240")
    slow = {"SLOW_STEP": "0.1"}
    with started("run", *around(SCRIPT, words), folder=tmp_path, env=slow) as running:
        os.kill(pid(tmp_path, "step", 2), signal.SIGKILL)
        done = running.wait(timeout_s=120)  # half of the time after which a frozen one is noticed
        assert "rank 2 was killed (SIGKILL)" in done.err


def test_a_frozen_rank_is_noticed_after_the_step_timeout(tmp_path: Path, untouched: str) -> None:
    words = ("-n", "2", "--max-restarts", "1", *SHORT, "timeout.step_s=2")
    given = around(SCRIPT, (*words, "checkpoint.every=1steps"))
    with started("run", *given, folder=tmp_path, env={"EVALUATE_UNTIL": "struck"}) as running:
        os.kill(pid(tmp_path, "evaluate", 1), signal.SIGSTOP)
        (tmp_path / "struck").touch()  # the others go on
        done = running.wait()
        assert done.code == 0, done
        assert digest(done.out) == untouched
        assert "rank 1 did not respond" in done.err


def torchrun(folder, *options, script=SCRIPT, **settings):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *options]
    env = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    env |= {MARK: str(folder), "TMPDIR": str(folder)}  # torchrun leaves a folder for logs behind
    env |= {"OMP_NUM_THREADS": "1", "SLOW_STEP": "0.05", **settings}
    return subprocess.Popen(
        [sys.executable, *words, script, *SAVING], cwd=folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def nothing_left(folder: Path) -> bool:
    limit = time.monotonic() + 60
    while (left := processes_with(str(folder))) and time.monotonic() < limit:
        time.sleep(0.05)
    return not left


def test_torchrun_as_the_outer_launcher_restarts_and_the_run_resumes(tmp_path, untouched):
    (tmp_path / "crash.py").write_text(CRASH_ONCE)
    with torchrun(
        tmp_path, "--max-restarts", "1", script="crash.py", SCRIPT=SCRIPT, CRASH_AT="7"
    ) as outer:
        out, _ = outer.communicate(timeout=120)
    assert outer.returncode == 0, out
    assert (tmp_path / "crashes-7").exists()
    assert "resumed after step " in out
    assert digest(out) == untouched
    assert nothing_left(tmp_path)


@pytest.mark.heavy
def test_a_killed_torchrun_leaves_no_orphan_training(tmp_path: Path) -> None:
    with torchrun(tmp_path) as outer:
        pid(tmp_path, "step", 1)
        outer.kill()
        outer.communicate(timeout=120)
    assert nothing_left(tmp_path)


def test_a_run_that_starts_over_does_so_once_however_often_it_is_started_again(tmp_path):
    first = run(tmp_path)
    assert first.code == 0
    again = run(tmp_path, "-n", "2", "resume=never", CRASH_AT="13", HOW="kill")
    assert again.code == 0, again
    assert "restarting on 2 ranks from the checkpoint of step " in again.err
    assert (
        "resumed after step " in again.out
    )  # that of the second start, not of the first run: it is not complete
    assert "this run is complete" not in again.out


def test_the_command_that_is_proposed_to_resume_does_not_start_over(tmp_path: Path) -> None:
    words = ("-n", "2", "--max-restarts", "0", "resume=never")
    failed = run(tmp_path, *words, CRASH_AT="13", HOW="kill")
    assert failed.code == 137, failed
    commands = [line for line in failed.err.splitlines() if line.startswith("  paceline run -n 2")]
    assert len(commands) == 1
    assert "resume=never" not in commands[0]
