"""Asked to stop, all ranks stop after the same step with one intact checkpoint, and exit with the code for resuming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline import handover
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.storage import verify
from paceline.errors import STOPPED
from paceline.events import TIME_LIMIT, surviving
from paceline.launch.signals import signal_name
from support.program import Running, around, paceline, started
from survive.conftest import SCRIPT, SHORT, digest, pid

LONG = (*SHORT, "epochs=200", "checkpoint.every=end")


def stopped_well(folder: Path, running: Running) -> int:
    """See that a run stopped as it should; return the step at which."""
    done = running.wait(timeout_s=120)
    assert done.code == STOPPED, done
    assert running.left_over() == []
    assert list(running.temporary.glob("paceline-*")) == []
    assert "the script goes on" not in done.out
    assert "Traceback" not in done.out + done.err
    assert (done.out + done.err).count("Rerun the same command to resume") == 1
    storage = LocalStorage(folder / "runs/training/checkpoints")
    newest = storage.steps()[0]
    assert verify(storage, newest).step == newest
    last = surviving(folder / "runs/training/events.jsonl")[-1]
    assert (last["event"], last["step"]) == ("RunStopped", newest)
    assert [path.name for path in storage.root.iterdir() if not path.name.startswith("step-")] == []
    return newest


def start(folder: Path, *words: str, **env: str):
    given = around(SCRIPT, (*LONG, *words))
    return started("run", "-n", "2", *given, folder=folder, env={"SLOW_STEP": "0.05", **env})


def heavy(*values: object):
    return pytest.param(*values, marks=pytest.mark.heavy)


@pytest.mark.parametrize(
    ("number", "ranks", "skew_s"),
    [
        (signal.SIGTERM, [1], 0.0),
        (signal.SIGINT, [1, 0], 0.15),
        heavy(signal.SIGUSR1, [0], 0.0),
        heavy(signal.SIGTERM, [0, 1], 0.0),
        heavy(signal.SIGTERM, [0, 1], 1.0),
        heavy(signal.SIGTERM, [1, 0], 2.0),
    ],
)
def test_a_signal_to_any_ranks_stops_all_at_the_same_step(tmp_path, number, ranks, skew_s):
    with start(tmp_path) as running:
        pids = [pid(tmp_path, "step", rank) for rank in ranks]
        os.kill(pids[0], number)
        if len(pids) > 1:
            time.sleep(skew_s)
            try:
                os.kill(pids[1], number)
            except ProcessLookupError:
                assert skew_s, "the second rank was gone at once"
        stopped_well(tmp_path, running)


@pytest.mark.parametrize(
    ("number", "ranks"),
    [(signal.SIGTERM, "3"), heavy(signal.SIGUSR1, "1"), heavy(signal.SIGINT, "2")],
)
def test_a_signal_to_the_launcher_does_the_same_and_the_run_resumes_later(
    tmp_path: Path, untouched: str, number: signal.Signals, ranks: str
) -> None:
    with start(tmp_path, "epochs=8") as running:
        pid(tmp_path, "step", 1)
        running.process.send_signal(number)
        stopped_well(tmp_path, running)
    assert surviving(tmp_path / "runs/training/events.jsonl")[-1]["reason"] == signal_name(number)
    again = paceline("run", "-n", ranks, SCRIPT, *SHORT, folder=tmp_path)
    assert again.code == 0, again
    assert digest(again.out) == untouched


@pytest.mark.parametrize(
    ("where", "exact"),
    [("save", "true"), ("evaluate", "false"), heavy("save", "false"), heavy("evaluate", "true")],
)
def test_a_signal_during_a_save_or_an_evaluation_waits_for_it(tmp_path, where, exact):
    slow = {f"SLOW_{where.upper()}": "0.5"}
    with start(tmp_path, "checkpoint.every=3steps", f"exact={exact}", **slow) as running:
        os.kill(pid(tmp_path, where, 1), signal.SIGTERM)
        stopped_well(tmp_path, running)


def test_a_signal_after_the_ranks_have_met_but_before_the_first_step(tmp_path: Path) -> None:
    with start(tmp_path, STEP_UNTIL="marks/heard-1") as running:
        os.kill(pid(tmp_path, "step", 1), signal.SIGTERM)
        assert stopped_well(tmp_path, running) == 1


@pytest.mark.parametrize(
    ("where", "whom"),
    [
        ("begin", "rank 1"),
        ("join", "launcher"),
        heavy("begin", "launcher"),
        heavy("join", "rank 1"),
    ],
)
def test_a_signal_before_the_training_ends_it_cleanly_with_nothing_to_lose(tmp_path, where, whom):
    with start(tmp_path, **{f"SLOW_{where.upper()}": "300"}) as running:
        rank = pid(tmp_path, where, 1)
        os.kill(rank if whom == "rank 1" else running.process.pid, signal.SIGTERM)
        done = running.wait(timeout_s=120)
        assert done.code == 128 + signal.SIGTERM  # not 75: there is nothing to resume from
        assert "Traceback" not in done.out + done.err
        assert running.left_over() == []
    assert LocalStorage(tmp_path / "runs/training/checkpoints").steps() == []


def test_a_second_interrupt_does_not_wait_for_the_step(tmp_path: Path) -> None:
    with start(tmp_path, SLOW_STEP="300") as running:
        pid(tmp_path, "step", 1)
        running.process.send_signal(signal.SIGINT)
        pid(tmp_path, "heard", 1)  # two that come at once would be one
        running.process.send_signal(signal.SIGINT)
        assert running.wait(timeout_s=120).code == 130
        assert running.left_over() == []


@pytest.mark.parametrize(
    "first", [signal.SIGTERM, heavy(signal.SIGINT)]
)  # Slurm and Kubernetes; LSF
def test_a_second_signal_of_a_scheduler_leaves_the_save_its_time(tmp_path, first):
    with start(tmp_path, SLOW_SAVE="1") as running:
        pid(tmp_path, "step", 1)
        running.process.send_signal(first)
        pid(tmp_path, "heard", 1)
        running.process.send_signal(signal.SIGTERM)
        stopped_well(tmp_path, running)


def test_a_deadline_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with start(tmp_path, "--stop-after", "6s", SLOW_STEP="0.1") as running:
        stopped_well(tmp_path, running)
    assert surviving(tmp_path / "runs/training/events.jsonl")[-1]["reason"] == TIME_LIMIT


@pytest.mark.parametrize("whom", ["rank 0", heavy("launcher")])
def test_the_last_step_is_the_end_of_the_run_also_when_asked_to_stop(tmp_path, whom):
    heard = "marks/heard-0" if whom == "rank 0" else "marks/heard-0 marks/heard-1"
    with start(tmp_path, "steps=1", STEP_UNTIL=heard) as running:
        rank = pid(tmp_path, "step", 0)
        os.kill(rank if whom == "rank 0" else running.process.pid, signal.SIGTERM)
        done = running.wait(timeout_s=120)
        assert done.code == 0, done
        assert "the script goes on after the training" in done.out


def test_a_launch_that_was_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    before = "        paceline.Trainer("
    text = Path(SCRIPT).read_text().replace(before, f"        raise_when_told()\n{before}")
    (tmp_path / "broken.py").write_text(
        "import signal, sys, time\n"
        "def raise_when_told():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: [][0])\n"
        "    mark('told')\n"
        "    time.sleep(300)\n" + text
    )
    with started("run", "-n", "2", "--max-restarts", "3", "broken.py", folder=tmp_path) as running:
        pid(tmp_path, "told", 1)
        running.process.send_signal(signal.SIGTERM)
        done = running.wait(timeout_s=120)
    assert done.code == 1, done
    assert "IndexError" in done.err
    assert "restarting on" not in done.err


FAILS = """
import math, os, signal
from paceline.train.stopping import StopRequest

try:
    with StopRequest(math.inf, 0).listening():
        raise ValueError("the data are gone")
except ValueError:
    os.kill(os.getpid(), signal.SIGTERM)  # as srun does when another rank has failed, too
    raise
"""


def test_a_signal_to_a_training_that_fails_does_not_make_it_one_that_stopped(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    mark = tmp_path / "stopped"
    done = subprocess.run(
        [sys.executable, "-m", "paceline.launch.rank_srun", "path", "fails.py"],
        cwd=tmp_path, env={**os.environ, handover.STOP_MARK: str(mark)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, mark.exists()) == (1, False), done.stderr
    assert "the data are gone" in done.stderr


STOPS = """
import math, os, signal
from paceline.errors import Stopped
from paceline.train.stopping import StopRequest

try:
    with StopRequest(math.inf, 0).listening():
        raise Stopped(5)
except Stopped:
    os.kill(os.getpid(), signal.SIGTERM)  # as the launcher sends it when another rank was asked to stop, too
    os.kill(os.getpid(), signal.SIGINT)
    print("left in order")
"""


@pytest.mark.parametrize(
    ("launcher", "end"),
    [("ours", (0, "left in order\n")), heavy("none", (-signal.SIGTERM, ""))],
    ids=["ours", "none"],
)
def test_a_signal_to_a_rank_that_has_saved_and_leaves_does_not_end_it_under_our_launcher(
    launcher: str, end: tuple[int, str]
) -> None:
    env = {**os.environ, handover.LAUNCHER: str(os.getpid()) if launcher == "ours" else ""}
    done = subprocess.run([sys.executable, "-c", STOPS], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == end, done.stderr


def test_a_rank_that_is_killed_while_it_stops_is_named(tmp_path: Path) -> None:
    with start(tmp_path, SLOW_SAVE="30") as running:
        rank = pid(tmp_path, "step", 1)
        running.process.send_signal(signal.SIGTERM)
        pid(tmp_path, "save", 1)
        os.kill(rank, signal.SIGKILL)
        done = running.wait(timeout_s=120)
    assert done.code == 137, done
    assert "rank 1 was killed (SIGKILL)" in done.err
