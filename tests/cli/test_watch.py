"""Is a run to be seen while it trains, from its files alone, on a terminal and off it?"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from paceline.cluster.registry import register
from paceline.events import EventLog, RunEnded, RunFailed
from support import run_folders as runs
from support.program import paceline, processes_with, started, wait_for, wait_until_gone
from support.terminal import in_terminal

# Rank 1 takes four times as long as rank 0 for its own part of a step.
TRAINING = """
import os, time, torch, paceline
from torch.nn.functional import mse_loss

class Net(torch.nn.Linear):
    def forward(self, features):
        time.sleep(0.04 if os.environ["RANK"] == "1" else 0.01)
        return super().forward(features)

def main(config):
    with paceline.Run(config) as run:
        model = run.model(Net(4, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        data = torch.randn(64, 4), torch.randn(64, 1)
        paceline.Trainer(run, model, optimizer, data, mse_loss).fit()

main(paceline.config_from_argv())
"""
SETTINGS = (
    "name=slow",
    "batch.global_size=8",
    "batch.lanes=2",
    "log.every_steps=2",
    "checkpoint.every=10steps",
)


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def watch(folder: Path, *words: str) -> str:
    done = paceline("watch", *words, folder=folder)
    assert (done.code, done.err) == (0, "")
    return done.out


def step_in(frame: str) -> int:
    return int(re.search(r"^step +([\d,]+) of", frame, re.MULTILINE)[1].replace(",", ""))


def test_a_training_is_watched_while_it_goes_and_after_it_was_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    desk = tmp_path / "desk"
    desk.mkdir()
    with started(
        "run", "-n", "2", "train.py", *SETTINGS, "steps=100000", folder=tmp_path
    ) as running:
        beats = [tmp_path / "runs" / "slow" / "ranks" / f"000{rank}.beat" for rank in range(2)]
        wait_for(*beats, timeout_s=120)
        with in_terminal("watch", "slow", "--every", "0.2", folder=tmp_path) as terminal:
            words = (
                "training",
                " of 100,000",
                "samples/s",
                "left",
                "saved  step ",
                "ranks  2 on cpu; rank 1 ",
            )
            terminal.wait_for(
                lambda: all(word in terminal.frame() for word in words), timeout_s=120
            )
            first = json.loads(watch(desk, "../runs/slow", "--json"))
            assert first["phase"] == "training"
            assert len(first["losses"]) > 2
            terminal.wait_for(
                lambda: step_in(terminal.frame()) >= first["step"] + 20, timeout_s=120
            )
            assert len(terminal.frames()) > 3
            pids = list(processes_with(running.mark))
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # a rank ends with the one before it
                    os.kill(pid, signal.SIGKILL)
            running.process.wait()
            wait_until_gone(*pids)  # none of them writes any more
            terminal.press_interrupt()
            assert terminal.wait() == 0
    for beat in beats:
        beat.unlink()
    assert "state  lost: " in watch(desk, "../runs/slow")


def test_on_a_terminal_it_redraws_in_place_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path / "runs" / "run", runs.started(), *runs.trained(1, 101))
    with (
        runs.holding(folder.lock),
        in_terminal("watch", "run", "--every", "0.2", folder=tmp_path) as terminal,
    ):
        terminal.wait_for(lambda: "step   101 of 1,000" in terminal.frame())
        with EventLog(folder.events) as log:
            for event in runs.trained(111, 1000, 1):
                log(event)
            terminal.wait_for(lambda: "step   1,000 of 1,000" in terminal.frame())
            terminal.resize(40, 8)
            terminal.wait_for(lambda: 0 < max(map(len, terminal.frame().splitlines())) <= 40)
            assert len(terminal.frame().splitlines()) <= 8
            terminal.resize(100, 30)
            log(RunEnded(1000, 5.0, "d"))
        assert terminal.wait() == 0
    assert "state  finished\n" in terminal.left()
    assert "step   1,000 of 1,000" in terminal.left()
    assert terminal.written.startswith("\x1b[?1049h")  # the alternate screen
    assert "\x1b[?25l" in terminal.written
    assert "\x1b[?25h" in terminal.written.rpartition("\x1b[H")[2]  # the cursor is back


def test_a_hostile_log_moves_no_cursor(tmp_path: Path) -> None:
    folder = runs.make_run(
        tmp_path / "runs" / "run", runs.started(), RunFailed(3, 0, "Boom: \x1b[2Jtwo\nlines")
    )
    (tmp_path / "job.log").write_text(
        "good line\n\x1b[2J\x1b[1;1Hover you\x07\x1b]0;title\x07\n\x9b31mred\rend\u202e\n"
    )
    register(runs.submission("17", folder.root, log=str(tmp_path / "job.log")))
    out = watch(tmp_path, "17")
    assert not set(out) & {"\x1b", "\x07", "\r", "\x9b", "\u202e"}
    assert "failed (Boom: two lines)" in out
    assert out.endswith("  good line\n  over you\ufffd\n  end\ufffd\n")
    assert "17  state unknown" in out
    assert "Slurm does not answer" in out


def test_off_a_terminal_it_is_shown_once(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path / "elsewhere" / "run", runs.started(), *runs.trained(1, 101))
    with runs.holding(folder.lock):
        out = watch(tmp_path, "run", "--runs", "elsewhere")
    assert "\x1b" not in out
    assert re.search(r"saved  step 101, \d+ s ago, 2.0 MB", out)
    assert "ranks  2 on cpu, 0 of them have reported so far" in out
    done = paceline(
        "watch", "run", "--runs", "elsewhere", folder=tmp_path, env={"PYTHONIOENCODING": "ascii"}
    )
    assert (done.code, done.err) == (0, "")


def test_a_run_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    runs.make_run(tmp_path / "runs" / "run")
    done = paceline("watch", "rnu", folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "'rnu'" in done.err
    assert "run?" in done.err


def test_a_large_history_is_shown_at_once(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path / "runs" / "run", runs.started())
    line = folder.events.read_text().replace("RunStarted", "StepDone").replace('"from_step": 0', '"step": 7, "loss": 0.5, "samples_per_s": 9.0')  # fmt: skip
    with folder.events.open("a") as file:
        file.write(line * 100_000)
    assert "step   7 of 1,000" in watch(tmp_path, "run")
