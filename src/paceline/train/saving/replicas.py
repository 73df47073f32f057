"""Whether all ranks hold the same training: weights, rates and tracked objects that one rank alone has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.errors import TrainingError
from paceline.exact.sharded_tensor import is_sharded
from paceline.world.collectives import all_gather_rows
from paceline.world.world import World

_NAMED = 3


def check_replicas(
    world: World, tensors: Mapping[str, Tensor], facts: Mapping[str, object], step: int
) -> None:
    """Raise if a tensor or a fact of some rank differs from that of rank 0. Every rank must call this."""
    if world.size == 1:
        return
    sums = {name: checksum(value) for name, value in tensors.items() if not is_sharded(value)}
    sums |= {name: _text_sum(value) for name, value in facts.items()}
    rows = all_gather_rows(world, torch.stack(list(sums.values())))
    differs = rows != rows[0]
    if not differs.any():
        return
    ranks = differs.any(dim=1).nonzero().flatten().tolist()
    names = [name for name, one in zip(sums, differs.any(dim=0).tolist(), strict=True) if one]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise TrainingError(
        f"after step {step} rank {', '.join(map(str, ranks))} has other values than rank 0 in "
        f"{', '.join(names[:_NAMED])}{more}",
        fix="change weights, learning rates and tracked objects on every rank alike, not on one rank only",
    )


def checksum(value: Tensor) -> Tensor:
    """Return a sum of a tensor's bits: equal for equal tensors.

    >>> int(checksum(torch.ones(2))) == int(checksum(torch.tensor([1.0, 1.0])))
    True
    """
    if not value.numel():
        return torch.zeros((), dtype=torch.int64)
    data = value.detach().contiguous().flatten()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(data.element_size(), torch.uint8)
    bits = data.view(width)
    half = bits[: bits.numel() // 2].sum(dtype=torch.int64)
    return (bits.sum(dtype=torch.int64) + 31 * half).cpu()


def _text_sum(value: object) -> Tensor:
    digest = hashlib.sha256(repr(value).encode()).digest()
    return torch.tensor(int.from_bytes(digest[:7], "big"))
