"""Resuming costs no reading through data: only the samples of the steps that are left are ever asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError, Stopped
from paceline.events import surviving
from paceline.world.world import World
from support.loops import SHORT, run_trainer, sgd
from support.processes import run_on_processes


class Counted(torch.utils.data.Dataset):
    """A dataset that remembers which samples were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(number)
        return torch.full((4,), float(number)), torch.zeros(1)


def train(folder: Path, steps: int) -> list[int]:
    words = f"steps={steps} batch.global_size=8 checkpoint.every=end lr.base=1e-5".split()
    config, data = config_from_words(RunConfig, [f"runs={folder}", *words]), Counted()
    run_trainer(World(), config, nn.Linear(4, 1), data, optimizer=sgd(1e-5))
    return data.asked[COMPARED:]


COMPARED = 5
"""Samples that are read at each start to compare the dataset with that of the other ranks and of the checkpoint."""


@pytest.mark.parametrize("seen", [1, 20, pytest.param(503, marks=pytest.mark.heavy)])
def test_only_what_is_left_is_read(tmp_path: Path, seen: int) -> None:
    assert len(train(tmp_path, seen)) == 8 * seen
    assert len(train(tmp_path, seen + 3)) == 8 * 3
    assert train(tmp_path, seen + 3) == [], "a run that is complete reads nothing else"


def train_here(config, world, stop_at: int) -> list[tuple[int, float]]:
    """Train on this rank, told to stop after a step; rank 0 returns the surviving losses."""

    def told(event) -> None:
        if getattr(event, "step", 0) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    generator = torch.Generator().manual_seed(5)
    data = torch.randn(40, 4, generator=generator), torch.randn(40, 1, generator=generator)
    pause_s = 0.0 if config.exact else 0.1  # there ranks ask each other only a few times a second

    def loss(outputs, targets):
        time.sleep(pause_s)
        return nn.functional.mse_loss(outputs, targets)

    torch.manual_seed(0)
    rule = partial(torch.optim.AdamW, lr=0.1)
    with contextlib.suppress(Stopped):
        run_trainer(world, config, nn.Linear(4, 1), data, loss=loss, optimizer=rule, sinks=[told])
    events = surviving(Path(config.runs) / "run/events.jsonl") if world.is_main else []
    return [(event["step"], event["loss"]) for event in events if "loss" in event]


@pytest.mark.parametrize(("exact", "worlds"), [(True, (2, 3)), (False, (2, 2))])
def test_losses_that_span_a_checkpoint_are_those_of_the_straight_run(tmp_path, exact, worlds):
    given = SHORT | {"log.every_steps": 3, "exact": exact, "steps": 12}
    straight, broken = (given | {"runs": str(tmp_path / name)} for name in ("straight", "broken"))
    whole = run_on_processes(train_here, worlds[1], tmp_path, straight, {"stop_at": -1})[0]
    part = run_on_processes(train_here, worlds[0], tmp_path, broken, {"stop_at": 6})[0]
    assert len(part) < len(whole), "it stopped between two shown losses"
    assert run_on_processes(train_here, worlds[1], tmp_path, broken, {"stop_at": -1})[0] == whole


class Extra(nn.Linear):
    """A model whose state is not all tensors."""

    def get_extra_state(self) -> dict:
        return {"calls": 3}

    def set_extra_state(self, state: dict) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "foreign", "fix"),
    [
        (Extra(4, 1), [], "register_buffer"),
        (nn.Linear(4, 1), [nn.Parameter(torch.zeros(3))], r"run\.model"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path, model, foreign, fix):
    config = config_from_words(RunConfig, [f"runs={tmp_path}", "steps=2", "batch.global_size=8"])
    data = torch.zeros(8, 4), torch.zeros(8, 1)

    with pytest.raises(ConfigError, match=fix):
        run_trainer(World(), config, model, data, optimizer=lambda own: sgd()([*own, *foreign]))
