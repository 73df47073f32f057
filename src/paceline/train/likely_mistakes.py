"""What a person who comes from another library types first, and what to type instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.errors import ConfigError, NoSuchAttribute, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

_WITH = "write `with paceline.Run(config) as run:`, and indent what uses the run below it"
_UPDATE = "run.update(optimizer, loss, step), where loss(batch) returns the loss"
_OF_RUN = {
    "rank": "run.world.rank, or run.is_main for rank 0",
    "local_rank": "run.world.local_rank",
    "global_rank": "run.world.rank",
    "world_size": "run.world.size",
    "size": "run.world.size",
    "num_processes": "run.world.size",
    "process_index": "run.world.rank",
    "is_main_process": "run.is_main",
    "is_local_main_process": "run.is_main",
    "is_global_zero": "run.is_main",
    "is_master": "run.is_main",
    "wait_for_everyone": "run.barrier()",
    "prepare": "run.model(model) and run.optimizer(optimizer); datasets and loaders go to run.steps as they are",
    "setup": "run.model(model) and run.optimizer(optimizer)",
    "dataloader": "run.steps(loader)",
    "loader": "run.steps(loader)",
    "setup_dataloaders": "run.steps(loader)",
    "epochs": "run.steps(data, epochs=3), whose step.epoch and step.ends_epoch tell the epoch",
    "step": _UPDATE,
    "optimize": _UPDATE,
    "train": f"for step in run.steps(data): {_UPDATE}",
    "fit": "paceline.Trainer(run, model, optimizer, data, loss).fit()",
    "scheduler": "run.track(scheduler=scheduler)",
    "register_for_checkpointing": "run.track(name=object)",
    "clip_grad_norm_": "run.update(optimizer, loss, step, clip=1.0)",
    "accumulate": "batch.lanes, the setting: a step adds the gradients of all its lanes",
    "no_sync": "batch.lanes, the setting: a step adds the gradients of all its lanes",
    "load": "the same command again, which resumes; for other weights `paceline ckpt import`",
    "save_state": "run.save()",
    "checkpoint": "run.save()",
    "all_reduce": "run.gather(tensor)",
    "reduce": "run.gather(tensor)",
    "eval": "run.evaluate(data, score)",
    "test": "run.evaluate(data, score)",
    "logger": "run.log(name=value)",
}
_BATCH = "loss(batch), the function that run.update calls for each micro-batch; step.lanes has those of this rank"
_OF_STEP = {
    "batch": _BATCH,
    "data": _BATCH,
    "inputs": _BATCH,
    "x": _BATCH,
    "loss": "found = run.update(optimizer, loss, step), and float(found)",
    "backward": "run.update(optimizer, loss, step)",
    "number": "step.index",
    "step": "step.index",
    "i": "step.index",
    "is_last": "step.ends_epoch, or code after the loop",
    "is_last_step": "step.ends_epoch, or code after the loop",
}


def missing_of_run(name: str, run: Any) -> NoSuchAttribute:
    """Return the error about an attribute that a run does not have."""
    if "world" not in vars(run) and (
        name in {"world", "_strategy", "_folder"} or hasattr(type(run), name)
    ):
        return NoSuchAttribute("the run was not entered by a with statement", fix=_WITH)
    return _missing("a run", name, _OF_RUN, type(run))


def missing_of_step(name: str, step: Any) -> NoSuchAttribute:
    """Return the error about an attribute that a step does not have."""
    return _missing("a step", name, _OF_STEP, type(step), *vars(step))


def _missing(
    what: str, name: str, instead: dict[str, str], kind: type, *own: str
) -> NoSuchAttribute:
    known = [each for each in [*dir(kind), *own] if not each.startswith("_")]
    fix = f"use {instead[name]}" if name in instead else did_you_mean(name, known)
    return NoSuchAttribute(f"{what} has no attribute {name!r}", fix=fix)


def refuse_iteration(step: object) -> ConfigError:
    """Return the error about a step that is unpacked as a batch."""
    return ConfigError("a step is not a batch, and cannot be unpacked", fix=f"use {_BATCH}")


def refuse_no_config(config: object) -> None:
    """Raise if a run gets something else than settings."""
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"paceline.Run must get a RunConfig, got {_kind(config)}",
            fix="write `with paceline.Run(paceline.config_from_argv()) as run:`, or "
            "paceline.Run(paceline.RunConfig(epochs=3))",
        )


def refuse_no_module(model: object) -> None:
    """Raise if a model is not one."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"run.model must get an nn.Module, got {_kind(model)}",
            fix="call run.model(model) with an object such as nn.Linear(4, 1); for several models call it once for each, "
            "with name=",
        )


def refuse_no_optimizer(optimizer: object) -> None:
    """Raise if an optimizer is not one."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"run.optimizer must get a torch.optim.Optimizer, got {_kind(optimizer)}",
            fix="write optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))",
        )


def refuse_other_call(usage: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a method say how it is called, after a call whose arguments do not fit."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                trace = error.__traceback__
                if trace is None or trace.tb_next is not None:
                    raise  # from the code of the function, or from what it called
                name = usage.partition("(")[0]
                problem = str(error).partition("() ")[2] or str(error)
                raise ConfigError(
                    f"{name} cannot be called so: {problem}", fix=f"call {usage}"
                ) from None

        return call

    return decorate


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
