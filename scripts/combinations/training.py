"""One line of the table: a model, an optimizer, data and settings; and how it is trained on this rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.config.values import with_settings
from paceline.errors import Stopped
from paceline.exact.sharded_tensor import whole
from paceline.exact.state import content, digests_of_all

STEPS = 7
"""Four steps make an epoch, so a training ends in the middle of its second one."""

_SETTINGS = {
    "batch.global_size": 12,
    "batch.lanes": 4,
    "steps": STEPS,
    "evaluate_steps": 3,
    "checkpoint.every": "end",
    "timeout.start_s": 60.0,
    "timeout.step_s": 30.0,
    "timeout.hang_steps": 0.0,
    "log.progress": "lines",
}

Record = dict[str, str]
"""What a training computed, by name: losses, metrics, and digests of all state."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of most lines."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def nothing(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Combination:
    """A training that people have, or could have."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Any]
    """loss(model, batch) -> what `run.update` takes; its mean is also the metric of the evaluation."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    settings: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[nn.Module], None] = nothing
    """Called before `run.model`."""
    setup: Callable[[nn.Module], None] = nothing
    """Called after `run.model`, to add hooks or freeze layers."""
    each_step: Callable[[nn.Module, torch.optim.Optimizer, int], None] = nothing
    """Called at the start of every step with its number."""
    collate: Callable[[list[Any]], Any] | None = None


class Progress:
    """How far a training has come, for the verdict on an error."""

    def __init__(self) -> None:
        self.updates = 0
        self.record: Record = {}


def train(
    each: Combination, folder: Path, stop_at: int, progress: Progress, device: str = "cpu"
) -> None:
    """Train on this rank, from the newest checkpoint on, until the end or a stop after a step."""
    settings = {**_SETTINGS, **each.settings, "runs": str(folder), "device": device}
    config = with_settings(paceline.RunConfig(), settings)
    try:
        with paceline.Run(config) as run:
            _loop(run, each, stop_at, progress)
    except Stopped:
        progress.record["stopped"] = "yes"


def _loop(run: paceline.Run, each: Combination, stop_at: int, progress: Progress) -> None:
    model, data = each.model(), each.data()
    each.before(model)
    run.model(model)
    each.setup(model)
    optimizer = run.optimizer(each.optimizer(model))

    def loss(batch: Any) -> Any:
        return each.loss(model, batch)

    def score(batch: Any) -> dict[str, Any]:
        found = each.loss(model, batch)
        return {"loss": found if isinstance(found, tuple) else (found * 3, 3)}

    for step in run.steps(data, collate=each.collate):
        each.each_step(model, optimizer, step.index)
        found = run.update(optimizer, loss, step)
        progress.updates += 1
        if not run.config.local_sgd.steps:
            progress.record[f"loss {step.index}"] = float(found).hex()
        if step.evaluates:
            metrics = run.evaluate(data, score, collate=each.collate)
            progress.record[f"metrics {step.index}"] = str(metrics)
        if step.index == stop_at:
            run.stop("the table resumes it on another number of ranks")
    progress.record |= _state(run, model, optimizer)


def _state(run: paceline.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
    """Return digests of all parameters, buffers, optimizer state and options. Every rank must call this."""
    found = {f"parameter {name}": _digest(value) for name, value in model.named_parameters()}
    found |= {f"buffer {name}": _digest(value) for name, value in model.named_buffers()}
    found |= {f"mode {name}": str(module.training) for name, module in model.named_modules()}
    names = {value: name for name, value in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for kind, value in sorted(state.items()):
            found[f"optimizer {kind} {names[parameter]}"] = _digest(value)
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        found[f"options {number}"] = f"{len(group['params'])} {options}"
    own = run._loop.updates.own_state()  # type: ignore[union-attr] # noqa: SLF001 - the replicas of local SGD
    return found | digests_of_all(run.world, own)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    full = whole(value.detach())
    return f"{full.dtype}{list(full.shape)} {hashlib.sha256(content(full)).hexdigest()[:16]}"
