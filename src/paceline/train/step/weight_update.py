"""The change of the weights: clipping, and the optimizer's step or a compiled version of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.train.model.sharded_tensor import clip_sharded, is_sharded

# Torch's capturable Adam divides by the learning rate, which gives nan for 0 in a compiled kernel. This is too small to change a weight.
_LEAST_RATE = 1e-30
_ALIGNMENT_BYTES = 512  # of CUDA's allocator
_COMPILED = (torch.optim.Adam, torch.optim.AdamW)


class Update(NamedTuple):
    """A function that changes the weights."""

    change: Callable[[], object]
    least_rate: float = 0.0
    """The smallest learning rate that it accepts."""


def make_update(optimizer: torch.optim.Optimizer, device: str, *, compiles: bool) -> Update:
    """Return the optimizer's step; compiled on a GPU, Adam and AdamW become few kernels unless they are fused.

    For few weights that is several times as fast as the fused kernel, which uses one thread block per 65,536 numbers.
    """
    if device == "cpu":
        return Update(optimizer.step)
    make_capturable(optimizer, device)  # also without capture, so that the bits are the same
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    is_supported = type(optimizer) in _COMPILED and not is_fused
    if not compiles or not is_supported:
        return Update(optimizer.step)
    step = optimizer.step
    return Update(torch.compile(lambda: step(), dynamic=False), _LEAST_RATE)  # noqa: PLW0108 - compile needs a plain function


def make_capturable(optimizer: torch.optim.Optimizer, device: str) -> None:
    """Keep step count and learning rate on the device, so that a CUDA graph can read them."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if "capturable" in group or group.get("fused"):
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
            for parameter in group["params"]:
                _move_step_count(optimizer.state.get(parameter, {}), device)


def _move_step_count(state: dict[str, Any], device: str) -> None:
    """Move the step count of an optimizer that has stepped on the host."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(device, torch.float32)


def clip(parameters: list[nn.Parameter], largest: float) -> None:
    """Scale the whole gradient down to a norm; the same bits for any memory layout of the gradients."""
    # On a GPU the order of a sum depends on the alignment of its input, and gradients in buckets are not aligned.
    gradients = [value.grad for value in parameters if value.grad is not None]
    if any(is_sharded(value) for value in gradients):
        clip_sharded(parameters, largest)
        return
    aligned = []
    for value in gradients:
        is_unaligned = value.is_cuda and value.data_ptr() % _ALIGNMENT_BYTES
        aligned.append(value.clone() if is_unaligned else value)
    nn.utils.clip_grads_with_norm_(parameters, largest, nn.utils.get_total_norm(aligned))
