"""A script in which one rank leaves the loop, finishes, or updates more or less often: is the line of that rank named?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.program import paceline

SCRIPT = """
import dataclasses
import torch
import paceline

@dataclasses.dataclass(frozen=True)
class Config(paceline.RunConfig):
    way: str = ""
    \"\"\"What rank 1 does in the fourth step.\"\"\"

def main(config):
    with paceline.Run(config) as run:
        model = run.model(torch.nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = lambda batch: model(batch[0]).square().mean()
        for step in run.steps((torch.ones(64, 4),)):
            if run.world.rank == 1 and step.index == 3:
                if config.way == "break":
                    break
                if config.way == "continue":
                    continue
                if config.way == "finish":
                    run.finish("enough")
                if config.way == "update":
                    run.update(optimizer, loss, step)
            run.update(optimizer, loss, step)

main(paceline.config_from_argv(Config))
"""


@pytest.mark.parametrize(
    "way", ["break", "update", *(pytest.param(way, marks=pytest.mark.heavy) for way in ("continue", "finish"))]
)  # fmt: skip
def test_the_line_where_one_rank_takes_another_way_is_named(tmp_path: Path, way: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    settings = [f"way={way}", "steps=20", "batch.global_size=8", "timeout.step_s=2"]
    done = paceline("run", "-n", "2", "--max-restarts", "0", "train.py", *settings, folder=tmp_path)
    what = {"finish": 'run.finish("enough")', "update": "    run.update(optimizer, loss, step)"}
    statement = f"    {what.get(way, way)}"
    line = 1 + next(number for number, text in enumerate(SCRIPT.splitlines()) if statement in text)
    error = done.err[done.err.index("error: ") :].partition("fix: ")[0]
    assert "rank 1" in error.partition(f"train.py:{line}")[0], done.err
    assert "step 4" in error
    facts = json.loads((tmp_path / "runs" / "train" / "failure.json").read_text())
    assert (facts["rank"], facts["cause"]) == (1, "another way")
