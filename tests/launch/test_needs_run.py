"""What a verb measures or compares is recorded by `paceline.Run`: another loop ends at its first step, and says so."""

from __future__ import annotations

from pathlib import Path

from paceline import handover
from paceline.launch.spec import LaunchSpec, script
from support.program import paceline

OTHER_LOOP = """
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([weight])
while True:
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
"""
HELPER = """
import paceline, torch

def train():
    with paceline.Run(paceline.config_from_argv()) as run:
        model = run.model(torch.nn.Linear(8, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps((torch.randn(64, 8),)):
            run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)
"""


def test_a_loop_without_a_run_ends_at_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(OTHER_LOOP)
    done = paceline("verify", "--worlds", "1,2", "loop.py", folder=tmp_path, cold=True)
    assert (done.code, done.out) == (2, "")
    assert "loop.py called Adam.step() without `paceline.Run`" in done.err
    assert done.err.count("fix:") == 1


def test_a_script_may_leave_its_run_to_a_module(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("from helper import train\ntrain()\n")
    (tmp_path / "helper.py").write_text(HELPER)
    words = ("verify", "--worlds", "1,2", "--steps", "2", "loop.py", "batch.global_size=16")
    done = paceline(*words, folder=tmp_path)
    assert done.code == 0, done.err
    assert "the same bits" in done.out


def test_only_ranks_of_verbs_are_asked_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(OTHER_LOOP)
    program = script(str(tmp_path / "loop.py"))
    assert handover.NEEDS_RUN not in LaunchSpec(program, 2).variables({})
    assert handover.NEEDS_RUN in LaunchSpec(program, 2, settings={"seed": "3"}).variables({})
