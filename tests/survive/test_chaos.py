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
    words = [
        "--kills",
        str(KILLS),
        "--seed",
        "3",
        "--worlds",
        "1,2,3",
        "--json",
        "batch.global_size=16",
        "epochs=12",
    ]
    done = paceline(
        "chaos", *around(SCRIPT, words), folder=tmp_path, env={"WATCHED": "1", "SLOW_STEP": "0.01"}
    )
    assert done.code == 0, done
    verdict = json.loads(done.out)
    assert verdict["same"]
    assert sum(verdict["strikes"].values()) == KILLS
    assert verdict["launches"] >= KILLS
    assert len(verdict["worlds"]) > 1
    every_sample_once_an_epoch(tmp_path, samples=96, steps_per_epoch=6, epochs=12)


def every_sample_once_an_epoch(
    folder: Path, samples: int, steps_per_epoch: int, epochs: int
) -> None:
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
            seen += set.union(
                *done[step].values()
            )  # ranks of one launch share a step; launches that repeat it agree
        assert sorted(seen) == list(range(samples)), f"epoch {epoch}"


def test_chaos_says_so_when_a_script_does_not_survive(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    text = (
        Path(SCRIPT)
        .read_text()
        .replace("model = run", "torch.manual_seed(os.getpid())\n        model = run")
    )
    script.write_text(text)
    done = paceline(
        "chaos", "--kills", "1", "--worlds", "1,2", str(script), "epochs=2", folder=tmp_path
    )
    assert done.code == 1
    assert "NOT the same: StepDone of step 1: loss was" in done.out


def test_who_stops_chaos_stops_all_of_it(tmp_path: Path) -> None:
    words = ["--kills", "50", "--worlds", "1,2", "batch.global_size=16", "epochs=40"]
    with started(
        "chaos", *around(SCRIPT, words), folder=tmp_path, env={"WATCHED": "1", "SLOW_STEP": "0.005"}
    ) as running:
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
        (["--kills", "0"], "give --kills 1 or more"),
        (["--worlds", "1"], "give at least two"),
        (["no_such.py"], "check the path"),
    ],
)
def test_what_chaos_cannot_do_is_refused(tmp_path: Path, words: list[str], fix: str) -> None:
    script = [] if words[0].endswith(".py") else ["toy"]
    done = paceline("chaos", *words, *script, folder=tmp_path)
    assert done.code == 2
    assert fix in done.err


def step(number: int, loss: float = 0.5, **more) -> dict:
    return {"event": "StepDone", "step": number, "loss": loss, **more}


END = {"event": "RunEnded", "digest": "a" * 64}


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([step(1), END], [step(1), END], ""),
        (
            [step(1), step(2), END],
            [step(1), step(2, 0.25), END],
            "StepDone of step 2: loss was 0.5, is 0.25",
        ),
        (
            [step(1), END],
            [step(1), step(2), END],
            "1 steps and epochs were logged, now 2",
        ),
        (
            [step(1), END],
            [step(1), END | {"digest": "b" * 64}],
            "final weights and optimizer state",
        ),
        (
            [step(1, samples=8), END],
            [step(1, samples=9), END],
            "StepDone of step 1: samples was 8, is 9",
        ),
    ],
)
def test_where_two_histories_part(one, other, words) -> None:
    assert first_difference(one, other).startswith(words)
    assert bool(first_difference(one, other)) == bool(words)


def test_steps_that_were_lost_are_not_part_of_the_surviving_history(tmp_path: Path) -> None:
    started = {"event": "RunStarted", "from_step": 0}
    lines = [
        started,
        step(1),
        step(2),
        {"event": "CheckpointSaved", "step": 1},
        step(3),
        started | {"from_step": 1},
        step(2, 0.1),
    ]
    file = tmp_path / "events.jsonl"
    file.write_text(
        "\n".join(map(json.dumps, lines[:5]))
        + '\n{"event": "Step\n'
        + "\n".join(map(json.dumps, lines[5:]))
    )
    assert [(event.get("step"), event.get("loss")) for event in surviving(file) if event["event"] == "StepDone"] == [
        (1, 0.5), (2, 0.1),
    ]  # fmt: skip
