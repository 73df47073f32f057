"""Tensors sharded over ranks: DTensors, split along the first dimension like `torch.chunk`.

Their mesh has one dimension, or two: then the last one is the shard group, and the first one holds replicas.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.world.collectives import all_gather_flat

if TYPE_CHECKING:  # slow to import, and most trainings do not need it
    from torch.distributed.device_mesh import DeviceMesh

SHARD_DIM = "shard"
"""The dimension of a mesh along which the model is sharded."""


def is_sharded(value: Tensor) -> bool:
    """Return whether each rank holds only a shard of this tensor."""
    # Slow to import; while nobody has imported it, nothing is sharded.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_part(value: Tensor) -> Tensor:
    """Return this rank's shard as a view; the tensor itself if it is not sharded."""
    sharded: Any = value
    local: Tensor = sharded.to_local() if is_sharded(value) else value
    return local


def whole(value: Tensor) -> Tensor:
    """Return the unsharded tensor. Every rank must call this, in the same order."""
    if not is_sharded(value):
        return value
    padded = torch.zeros(_shard_elements(value), dtype=value.dtype, device=value.device)
    padded[: local_part(value).numel()] = local_part(value).flatten()
    return all_gather_flat(padded, _mesh(value).get_group())[: value.numel()].view(value.shape)


def put(target: Tensor, value: Tensor) -> None:
    """Copy an unsharded value into a tensor, or into this rank's shard of it."""
    if is_sharded(target):
        value = _shard_of(value, target)
    local_part(target).copy_(value)


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of an unsharded value, on the device of a parameter and sharded like it."""
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    if not is_sharded(parameter):
        # With the strides of the parameter, like the state that optimizers create.
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return shards_of(value, parameter)


def shards_of(value: Tensor, like: Tensor) -> Tensor:
    """Return a copy of an unsharded value, on the device and over the ranks of a sharded tensor."""
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    rank, ranks = _mesh(like).get_local_rank(), _mesh(like).size()
    rows = -(-value.shape[0] // ranks)
    shard = value[rank * rows : (rank + 1) * rows].to(like.device, copy=True)
    same_shape = value.shape == like.shape
    return DTensor.from_local(
        shard,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=value.shape,
        stride=like.stride() if same_shape else value.stride(),
    )


def clip_sharded(parameters: list[nn.Parameter], largest: float) -> None:
    """Scale the whole gradient down to a norm, with the bits of gradients that are not sharded.

    The norm of each parameter is computed from its unsharded gradient. Gradients are gathered one after the other,
    so that no more than the largest of them is in memory; this sends as many bytes as the model has.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([torch._foreach_norm([whole(value)])[0] for value in gradients])  # noqa: SLF001 - as get_total_norm does
    shards = [local_part(parameter).detach() for parameter in parameters]
    for value, gradient in zip(shards, gradients, strict=True):
        value.grad = local_part(gradient)
    nn.utils.clip_grads_with_norm_(shards, largest, torch.linalg.vector_norm(norms))


def _shard_of(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of an unsharded tensor."""
    rank, rows = _mesh(like).get_local_rank(), _rows(like)
    return value[rank * rows : (rank + 1) * rows]


def _shard_elements(value: Tensor) -> int:
    """Return the number of elements in the largest shard."""
    return _rows(value) * (value.numel() // max(1, value.shape[0]))


def _rows(value: Tensor) -> int:
    """Return the number of rows in the largest shard."""
    return -(-value.shape[0] // _mesh(value).size())


def _mesh(value: Tensor) -> DeviceMesh:
    """Return the mesh of the shard group of a tensor."""
    sharded: Any = value
    mesh: DeviceMesh = sharded.device_mesh
    return mesh if mesh.ndim == 1 else mesh[SHARD_DIM]
