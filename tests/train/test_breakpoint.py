"""Does a debugger on one rank hold the others, without time-outs, hang reports or other bits?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.loops import events_in
from support.program import paceline
from support.terminal import Terminal, in_terminal

SCRIPT = """
import torch, paceline

def main(config):
    data = (torch.arange(40.0).view(40, 1),)
    with paceline.Run(config) as run:
        model = run.model(torch.nn.Linear(1, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        for step in run.steps(data):
            secret = 1000 + run.world.rank
            run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)
            if step.index == 6 and HOLD:
                run.breakpoint(rank=RANK)

main(paceline.config_from_argv())
"""
WORDS = ("train.py", "name=held", "batch.global_size=8", "batch.lanes=4", "timeout.step_s=4")


def script(folder: Path, *, hold: bool = True, rank: int = 0) -> None:
    text = SCRIPT.replace("HOLD", str(hold)).replace("RANK", str(rank))
    (folder / "train.py").write_text(text)


@pytest.fixture
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """Two or more ranks, of which rank 1 waits in a debugger for what is typed."""
    script(tmp_path, rank=1)
    options = ("-n", getattr(request, "param", "2"), "--max-restarts", "0")
    with in_terminal("run", *options, *WORDS, folder=tmp_path) as terminal:
        terminal.wait_for(lambda: "(Pdb)" in terminal.read())
        yield terminal


@pytest.mark.slow
def test_the_run_continues_with_the_same_bits_after_any_time(held, tmp_path):
    assert "rank 1 of 2 is held at train.py:" in held.written
    held.type_line("p secret, step.index")
    held.wait_for(lambda: "(1001, 6)" in held.read())
    held.type_line("n")
    held.wait_for(lambda: "type c to continue" in held.read())
    time.sleep(5)  # longer than timeout.step_s, and than the watchdog waits
    asked = paceline("hang", "runs/held", folder=tmp_path)
    assert asked.code == 0, asked
    assert "debugger in step 7; rank 0 waits" in asked.out
    assert "held in step 7" in asked.out
    held.type_line("c")
    assert held.wait() == 0, held.written
    assert "watchdog" not in held.written
    [ended] = events_in(tmp_path / "runs", "RunEnded", "held")
    assert (
        max(event["samples_per_s"] for event in events_in(tmp_path / "runs", "EpochDone", "held"))
        > 0
    )
    after = json.loads((tmp_path / "runs" / "held" / "hang" / "0001.json").read_text())
    assert after["state"] == "left"

    (tmp_path / "plain").mkdir()
    script(tmp_path / "plain", hold=False)
    done = paceline("run", *WORDS, folder=tmp_path / "plain")
    assert done.code == 0, done
    assert (
        events_in(tmp_path / "plain" / "runs", "RunEnded", "held")[0]["digest"] == ended["digest"]
    )


@pytest.mark.heavy
@pytest.mark.parametrize("held", ["3"], indirect=True)
def test_q_ends_the_run_on_all_ranks(held: Terminal, tmp_path: Path) -> None:
    held.type_line("q")
    assert held.wait() == 1, held.written
    assert "the user ended the run in the debugger of rank 1" in held.written
    assert events_in(tmp_path / "runs", "RunFailed", "held")


@pytest.mark.parametrize(("rank", "code", "said"), [(0, 3, "terminal"), (5, 2, "rank=5")])
def test_without_a_terminal_and_on_a_rank_that_does_not_exist_it_is_refused(
    rank: int, code: int, said: str, tmp_path: Path
) -> None:
    script(tmp_path, rank=rank)
    done = paceline("run", "-n", "2", "--max-restarts", "0", *WORDS, folder=tmp_path)
    assert done.code == code, done
    assert said in done.err
