"""All the state of a run, tensor by tensor, under names that do not depend on how it is spread over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.train.parallel import inner


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and buffers as `model.NAME`, optimizer state as `optimizer.KIND.NAME`."""
    module = inner(model)
    for name, value in module.state_dict().items():
        yield f"model.{name}", value.detach()
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, state in optimizer.state.items():
        for kind, value in sorted(state.items()):
            if value is not None:
                yield f"optimizer.{kind}.{names[parameter]}", torch.as_tensor(value).detach()


def content(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def digest_of(name: str, value: Tensor) -> str:
    """Return the SHA-256 of one tensor with its name, type and shape."""
    label = f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
    return hashlib.sha256(label + content(value)).hexdigest()


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return one SHA-256 over weights, buffers and optimizer state."""
    whole = hashlib.sha256()
    for name, value in sorted(named_state(model, optimizer)):
        whole.update(digest_of(name, value).encode())
    return whole.hexdigest()
