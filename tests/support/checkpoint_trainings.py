"""Trainings that the tests interrupt, damage and resume."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.world.world import World
from support.checkpoint_contents import until_writers_are_done
from support.loops import RunIn

BASE = [
    "batch.lanes=2",
    "batch.global_size=16",
    "epochs=4",
    "log.every_steps=3",
    "checkpoint.every=5steps",
    "lr.base=0.01",
]


class Numbered(torch.optim.Optimizer):
    """An optimizer that keeps Python numbers of every kind, and depends on each of them."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(count=0, large=2**53, rate=0.1, odd=False)
                state["count"] += 1
                state["large"] += 1
                state["rate"] *= 0.9
                state["odd"] = not state["odd"]
                factor = math.sin(state["rate"] * (state["large"] - 2**53) + state["odd"])
                parameter -= group["lr"] * factor * parameter.grad  # noqa: PLW2901


def _of(kind: type[torch.optim.Optimizer], factor: float = 1.0, **options: Any) -> Any:
    return lambda parameters, lr: kind(parameters, lr=lr * factor, **options)


OPTIMIZERS = {
    "Python numbers": Numbered,
    "AdamW": _of(torch.optim.AdamW),
    "AdamW amsgrad": _of(torch.optim.AdamW, amsgrad=True),
    "AdamW fused": _of(torch.optim.AdamW, fused=True),
    "SGD": _of(torch.optim.SGD),
    "SGD momentum": _of(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adadelta": _of(torch.optim.Adadelta, 100),
    "Adagrad": _of(torch.optim.Adagrad),
    "Adamax": _of(torch.optim.Adamax),
    "Adafactor": _of(torch.optim.Adafactor),
    "ASGD": _of(torch.optim.ASGD, t0=3),
    "NAdam": _of(torch.optim.NAdam),
    "RAdam": _of(torch.optim.RAdam),
    "RMSprop": _of(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": _of(torch.optim.Rprop),
}


class Cut(Exception):
    """The end of a process, as far as the run can tell."""


class Net(nn.Module):
    """A small network with dropout, and with buffers that move."""

    def __init__(
        self, width: int = 8, extra: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.first = nn.Linear(4, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.last = nn.Linear(width, 1, dtype=dtype)
        if extra:
            self.extra = nn.Linear(1, 1, dtype=dtype)

    def forward(self, values):
        hidden = nn.functional.dropout(
            torch.relu(self.norm(self.first(values))), 0.2, self.training
        )
        found = self.last(hidden)
        return self.extra(found) if hasattr(self, "extra") else found  # noqa: S610


def settings(tmp_path: Path, *words: str) -> RunConfig:
    return config_from_words(RunConfig, [*BASE, f"runs={tmp_path}", *words])


def train(
    config: RunConfig,
    *,
    optimizer=OPTIMIZERS["AdamW"],
    net: Any = Net,
    samples: int = 60,
    cut_after: int = 0,
    world: World = World(),
    seen: list[Any] | None = None,
) -> str:
    """Train to the end and return the digest; or break off after a step."""
    torch.manual_seed(0)
    dtype = next(net().parameters()).dtype
    torch.manual_seed(1)
    data = torch.randn(samples, 4, dtype=dtype), torch.randn(samples, 1, dtype=dtype)
    model = net()
    digests: list[str] = []
    lanes, calls = config.batch.lanes // world.size, 0

    def loss(outputs, target):
        nonlocal calls
        if torch.is_grad_enabled():
            calls += 1
            if cut_after and calls > cut_after * lanes:
                raise Cut
        return nn.functional.mse_loss(outputs, target)

    def note(event):
        if seen is not None:
            seen.append(event)
        if hasattr(event, "digest"):
            digests.append(event.digest)

    try:
        with RunIn(world, config, sinks=[note]) as run:
            run.model(model)
            chosen = optimizer(model.parameters(), paceline.scaled_lr(config))
            run.optimizer(chosen)
            paceline.Trainer(run, model, chosen, data, loss, evaluation=data).fit()
    finally:
        until_writers_are_done()
    return digests[-1] if digests else ""


def cut(config: RunConfig, steps: int, **more: Any) -> None:
    """Train for some steps more, then break off; as the end of a process would, wait for a save that is under way."""
    with pytest.raises(Cut):
        train(config, cut_after=steps, **more)
    for thread in threading.enumerate():
        if thread.name == "paceline-save":
            thread.join()


def events_of(tmp_path: Path, kind: str) -> list[dict]:
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())


def train_elsewhere(env: Mapping[str, str], words: list[str], chunk_bytes: int, width: int) -> None:
    """Train in a process of its own, with its own variables, and with smaller pieces for uploads."""
    from paceline.checkpoint import remote_storage

    os.environ |= env
    remote_storage.CHUNK_BYTES = chunk_bytes
    train(config_from_words(RunConfig, words), net=lambda: Net(width), optimizer=OPTIMIZERS["SGD"])
