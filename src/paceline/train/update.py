"""How weights change by their gradients: as the optimizer does it, or compiled with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.config import RunConfig

# Torch's Adam for graphs divides by the rate, and what comes of 0 in a compiled kernel is no number. This moves no weight.
_LEAST_RATE = 1e-30
_COMPILED = (torch.optim.Adam, torch.optim.AdamW)


class Update(NamedTuple):
    """What changes the weights."""

    change: Callable[[], object]
    least_rate: float = 0.0
    """The least learning rate it can take."""


def make_update(optimizer: torch.optim.Optimizer, config: RunConfig, device: str) -> Update:
    """Return the optimizer's step; with `compile`, on a GPU, Adam and AdamW become one kernel, unless they are fused already.

    For few weights that is several times as fast as the fused one, which gives 65,536 numbers to each block of threads.
    """
    if device != "cpu":
        make_capturable(
            optimizer, device
        )  # also where nothing is captured, so that the bits are the same
    fused = any(group.get("fused") for group in optimizer.param_groups)
    takes_turns = config.local_sgd.steps > 0  # and would be compiled for each replica
    if (
        device == "cpu"
        or not config.compile
        or fused
        or takes_turns
        or type(optimizer) not in _COMPILED
    ):
        return Update(optimizer.step)
    step = optimizer.step
    return Update(torch.compile(lambda: step(), dynamic=False), _LEAST_RATE)  # noqa: PLW0108 - the optimizer itself is no function


def make_capturable(optimizer: torch.optim.Optimizer, device: str) -> None:
    """Let an optimizer keep on the device what it counts, and the learning rate, so that a graph need not know them."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if "capturable" in group or group.get("fused"):
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
            for parameter in group["params"]:
                _bring_count(optimizer.state.get(parameter, {}), device)


def _bring_count(state: dict[str, Any], device: str) -> None:
    """Bring to the device what an optimizer that has stepped before has counted on the host."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(device, torch.float32)
