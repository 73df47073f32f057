"""Short trainings through `paceline.Run`, in a world that a test has joined already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.config import RunConfig
from paceline.train.saving.state import state_digest
from paceline.world.world import World


class RunIn(paceline.Run):
    """A run in a world that exists; it stays joined afterwards."""

    def __init__(self, world: World, config: RunConfig, *, sinks: Sequence[Any] = ()) -> None:
        super().__init__(config, sinks=sinks)
        self._existing = world

    def _joined(self) -> contextlib.AbstractContextManager[World]:
        torch.set_num_threads(self.config.threads)  # as `join` does: they are part of the bits
        return contextlib.nullcontext(self._existing)


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
