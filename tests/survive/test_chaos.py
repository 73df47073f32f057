"""Killed at random on changing numbers of ranks, a run ends with the same bits, and sees every sample once."""

from __future__ import annotations

import ast
import json
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from paceline.errors import STOPPED
from paceline.events import surviving
from paceline.verify.chaos import first_difference
from support.program import around, paceline, started, wait_until
from survive.conftest import SCRIPT

KILLS = 3


def test_chaos_ends_with_the_same_bits_and_every_sample_is_seen_once(tmp_path: Path) -> None:
    words = ["--kills", str(KILLS), "--seed", "3", "--worlds", "1,2,3", "--json"]
    given = around(SCRIPT, [*words, "batch.global_size=16", "epochs=12"])
    watched = {"WATCHED": "1", "SLOW_STEP": "0.01"}
    done = paceline("chaos", *given, folder=tmp_path, env=watched)
    assert done.code == 0, done
    verdict = json.loads(done.out)
    assert verdict["same"]
    assert sum(verdict["strikes"].values()) == KILLS
    assert verdict["launches"] >= KILLS
    assert len(verdict["worlds"]) > 1
    every_sample_once_an_epoch(tmp_path, samples=96, steps_per_epoch=6, epochs=12)


def every_sample_once_an_epoch(folder, samples, steps_per_epoch, epochs):
    """See that whoever did a step used the same samples, and that the steps of an epoch use each sample once."""
    done = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("seen-*"):
        for line in file.read_text().splitlines():
            _, step, ids = line.split(" ", 2)
            done[int(step)][file.name] |= set(ast.literal_eval(ids))
    assert sorted(done) == list(range(steps_per_epoch * epochs))
    for epoch in range(epochs):
        seen: list[int] = []
        for step in range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch):
            # Ranks of one launch share a step; launches that repeat it agree.
            seen += set.union(*done[step].values())
        assert sorted(seen) == list(range(samples)), f"epoch {epoch}"


def test_chaos_says_so_when_a_script_does_not_survive(tmp_path: Path) -> None:
    seeded = "torch.manual_seed(os.getpid())\n        model = run"
    text = Path(SCRIPT).read_text().replace("model = run", seeded)
    (tmp_path / "forgetful.py").write_text(text)
    words = ("--kills", "1", "--worlds", "1,2", "forgetful.py", "epochs=2")
    done = paceline("chaos", *words, folder=tmp_path)
    assert done.code == 1
    assert "NOT the same: StepDone of step 1: loss was" in done.out


@pytest.mark.heavy
def test_who_stops_chaos_stops_all_of_it(tmp_path: Path) -> None:
    words = ["--kills", "50", "--worlds", "1,2", "batch.global_size=16", "epochs=40"]
    watched = {"WATCHED": "1", "SLOW_STEP": "0.005"}
    with started("chaos", *around(SCRIPT, words), folder=tmp_path, env=watched) as running:
        wait_until(lambda: len(list(tmp_path.glob("seen-*"))) > 1, "a launch under chaos")
        running.process.send_signal(signal.SIGTERM)
        done = running.wait()
        assert running.left_over() == []
    assert done.code == STOPPED
    assert "was asked to stop on" in done.err
    assert "make it run" not in done.err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--worlds", "1", "toy"], "give at least two"),
        pytest.param(["--kills", "0", "toy"], "--kills 1", marks=pytest.mark.heavy),
        pytest.param(["no_such.py"], "check the path", marks=pytest.mark.heavy),
    ],
)
def test_what_chaos_cannot_do_is_refused(tmp_path: Path, words: list[str], fix: str) -> None:
    done = paceline("chaos", *words, folder=tmp_path)
    assert done.code == 2
    assert fix in done.err


def step(number: int, loss: float = 0.5, **more) -> dict:
    return {"event": "StepDone", "step": number, "loss": loss, **more}


END = {"event": "RunEnded", "digest": "a" * 64}


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([step(1), END], [step(1), END], ""),
        ([step(1), step(2), END], [step(1), step(2, 0.25), END], "StepDone of step 2: loss"),
        ([step(1), END], [step(1), step(2), END], "1 steps"),
        ([step(1), END], [step(1), END | {"digest": "b" * 64}], "final weights"),
        ([step(1, samples=8), END], [step(1, samples=9), END], "StepDone of step 1: samples"),
    ],
)
def test_where_two_histories_part(one, other, words) -> None:
    assert first_difference(one, other).startswith(words)
    assert bool(first_difference(one, other)) == bool(words)


def test_steps_that_were_lost_are_not_part_of_the_surviving_history(tmp_path: Path) -> None:
    started, saved = (
        {"event": "RunStarted", "from_step": 0},
        {"event": "CheckpointSaved", "step": 1},
    )
    before = [started, step(1), step(2), saved, step(3)]
    lines = [*map(json.dumps, before), '{"event": "Step']
    lines += map(json.dumps, [started | {"from_step": 1}, step(2, 0.1)])
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    left = [event for event in surviving(tmp_path / "events.jsonl") if event["event"] == "StepDone"]
    assert [(event["step"], event["loss"]) for event in left] == [(1, 0.5), (2, 0.1)]
