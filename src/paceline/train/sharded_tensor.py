"""What a tensor is of which every rank holds a slice: a DTensor, cut along its first dimension as `torch.chunk` does.

Its mesh has one dimension, or two: then the last one holds the ranks that share a copy, and copies are alike.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.world.collectives import all_gather_flat

if TYPE_CHECKING:  # slow to import, and most trainings need it not
    from torch.distributed.device_mesh import DeviceMesh

COPY = "copy"
"""The dimension of a mesh along which one copy of the model lies."""


def is_sharded(value: Tensor) -> bool:
    """Return whether ranks hold slices of this tensor."""
    tensors = sys.modules.get(
        "torch.distributed.tensor"
    )  # slow to import, and nothing is sharded before it is
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_part(value: Tensor) -> Tensor:
    """Return this rank's slice, in place; all of it if it is whole."""
    sharded: Any = value
    found: Tensor = sharded.to_local() if is_sharded(value) else value
    return found


def whole(value: Tensor) -> Tensor:
    """Return a tensor as every rank would have it without sharding. Every rank must call this, in the same order."""
    if not is_sharded(value):
        return value
    padded = torch.zeros(_slice_size(value), dtype=value.dtype, device=value.device)
    padded[: local_part(value).numel()] = local_part(value).flatten()
    return all_gather_flat(padded, _mesh(value).get_group())[: value.numel()].view(value.shape)


def put(target: Tensor, value: Tensor) -> None:
    """Fill a tensor, or the slice of it that is this rank's, from a whole one."""
    if is_sharded(target):
        value = _cut(value, target)
    local_part(target).copy_(value)


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a whole tensor of a parameter's shape, on its device and sharded as it is."""
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    if not is_sharded(parameter):
        return torch.empty_like(parameter, dtype=value.dtype).copy_(
            value
        )  # in the order of its memory, as optimizers have it
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    cut = _cut(value, parameter).to(parameter.device, copy=True)
    return DTensor.from_local(
        cut,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def clip_sharded(parameters: list[nn.Parameter], largest: float) -> None:
    """Shrink the whole gradient to a norm, with the bits of gradients that are not sharded.

    The norm is that of the norms of the parameters, each taken of its whole gradient: these are gathered one after the
    other, so that no more than the largest of them is ever held, for as many bytes on the wire as the model has.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([torch._foreach_norm([whole(value)])[0] for value in gradients])  # noqa: SLF001 - as get_total_norm does
    slices = [local_part(parameter).detach() for parameter in parameters]
    for value, gradient in zip(slices, gradients, strict=True):
        value.grad = local_part(gradient)
    nn.utils.clip_grads_with_norm_(slices, largest, torch.linalg.vector_norm(norms))


def _cut(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of a whole tensor."""
    rank, rows = _mesh(like).get_local_rank(), _rows(like)
    return value[rank * rows : (rank + 1) * rows]


def _slice_size(value: Tensor) -> int:
    """Return how many elements the largest slice has."""
    return _rows(value) * (value.numel() // max(1, value.shape[0]))


def _rows(value: Tensor) -> int:
    """Return how many rows the largest slice has."""
    return -(-value.shape[0] // _mesh(value).size())


def _mesh(value: Tensor) -> DeviceMesh:
    """Return the ranks that share one copy of a sharded tensor."""
    sharded: Any = value
    mesh: DeviceMesh = sharded.device_mesh
    return mesh if mesh.ndim == 1 else mesh[COPY]
