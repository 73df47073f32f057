"""Short trainings through `paceline.Run`, in a world that a test has joined already."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.config import RunConfig
from paceline.config.given import with_values
from paceline.config.values import with_settings
from paceline.exact.state import state_digest
from paceline.world.world import World

SHORT = {"batch.global_size": 8, "batch.lanes": 4, "epochs": 2, "checkpoint.every": "end"}


def config_in(folder: Path, **settings: object) -> RunConfig:
    """Return the settings of a short training in four lanes, whose run lies in a folder."""
    return with_settings(RunConfig(), SHORT | {"runs": str(folder)} | settings)


def events_in(folder: Path, kind: str = "", name: str = "run") -> list[dict[str, Any]]:
    """Return the events of a run of a folder, or those of one kind."""
    lines = (folder / name / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if kind in {"", event["event"]}]


def line(
    run: paceline.Run, lr: float = 1e-5, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Give a run a model of two numbers and its optimizer."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    assert run.model(model) is model
    assert run.optimizer(optimizer) is optimizer
    return model, optimizer


def updated(
    run: paceline.Run, data: Any, **how: Any
) -> Iterator[tuple[nn.Module, Any, paceline.Step]]:
    """Train the model of two numbers; yield it, its optimizer and each step after its update."""
    model, optimizer = line(run)
    for step in run.steps(data, **how):
        run.update(optimizer, squares(model), step)
        yield model, optimizer, step


class Patience:
    """Something with a state, as early stopping has it."""

    def __init__(self) -> None:
        self.best, self.bad, self.history = 1e9, 0, ()

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def squares(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    """Return a loss that needs no targets."""
    return lambda batch: model(batch[0]).square().mean()


class RunIn(paceline.Run):
    """A run in a world that exists; it stays joined afterwards."""

    def __init__(self, world: World, config: RunConfig, *, sinks: Sequence[Any] = ()) -> None:
        super().__init__(config, sinks=sinks)
        self._existing = world

    def _joined(self) -> Any:
        torch.set_num_threads(self.config.threads)  # as `join` does: they are part of the bits
        batch = replace(self.config.batch, lanes=int(self.config.batch.lanes))
        return contextlib.nullcontext((self._existing, with_values(self.config, batch=batch)))


def sgd(lr: float = 0.1, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


class Fitted:
    """A model, its optimizer, and the loss of each step, after some steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.losses: list[float] = []

    @property
    def digest(self) -> str:
        return state_digest(self.model, self.optimizer)


def fit(
    world: World,
    config: RunConfig,
    model: nn.Module,
    data: Any,
    *,
    loss: Callable[..., Any] = mse_loss,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd(),
    wrap: tuple[type[nn.Module], ...] | None = None,
    before: Callable[[paceline.Run], None] = lambda run: None,
) -> Fitted:
    """Train from the beginning to the end; keep no checkpoint of it but the last."""
    with RunIn(world, replace(config, resume="never")) as run:
        run.model(model, wrap=wrap)
        made = optimizer([value for value in model.parameters() if value.requires_grad])
        fitted = Fitted(model, run.optimizer(made))

        def lane(batch: Any) -> Any:
            *inputs, target = batch
            return loss(model(*inputs), target)

        for step in run.steps(data):
            before(run)
            found = run.update(made, lane, step)
            if not config.local_sgd.steps:
                fitted.losses.append(float(found))
    return fitted


def lanes_of(world: World, config: RunConfig, data: Any) -> Iterator[Any]:
    """Yield the lanes of this rank, step by step."""
    from paceline.data.reading.batches import Batches

    return Batches(data, config, world).steps()


def run_trainer(
    world: World,
    config: RunConfig,
    model: nn.Module,
    data: Any,
    *,
    loss: Callable[..., Any] = mse_loss,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd(),
    sinks: Sequence[Any] = (),
    **more: Any,
) -> torch.optim.Optimizer:
    """Train by the `Trainer`, from the newest checkpoint on."""
    with RunIn(world, config, sinks=sinks) as run:
        run.model(model)
        made = optimizer([value for value in model.parameters() if value.requires_grad])
        paceline.Trainer(run, model, run.optimizer(made), data, loss, **more).fit()
    return made
