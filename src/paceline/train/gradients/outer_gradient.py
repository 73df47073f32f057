"""Outer gradient of local SGD: mean of (start - weights) over all replicas, reduced in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.train.gradients.bucket_exchange import TreeShape
from paceline.train.gradients.exchange_choice import choose_exchange
from paceline.world.collectives import wire_device
from paceline.world.world import World

_BUCKET_BYTES = 32 << 20  # an exchange holds a few copies of its bucket
_COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OuterGradient:
    """Computes the outer gradient, with the same bits in any world. All ranks must call it together.

    With compression each difference is rounded before it is sent, and so is every sum of the tree, in a
    world of one as well.
    """

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._replicas = world, config.local_sgd.replicas
        self._dtype = _COMPRESSED.get(config.compression)
        self._merges = merges_after(share(self._replicas, world.rank, world.size), self._replicas)
        self._shape = TreeShape.of(self._replicas, world)

    def __call__(self, start: list[Tensor], replicas: list[list[Tensor]]) -> list[Tensor]:
        """Return the outer gradient of each weight, from the common start and this rank's replicas."""
        gradients: list[Tensor] = []
        for bucket in buckets(start):
            differences = (self._difference(start[bucket], weights[bucket]) for weights in replicas)
            mean = self._sum(differences).to(start[bucket][0].dtype).div_(self._replicas)
            pieces = torch.split(mean, [value.numel() for value in start[bucket]])
            for piece, value in zip(pieces, start[bucket], strict=True):
                gradients.append(piece.view_as(value))
        return gradients

    def _difference(self, start: list[Tensor], weights: list[Tensor]) -> Tensor:
        pairs = zip(start, weights, strict=True)
        flat = torch.cat([(before - after).flatten() for before, after in pairs])
        return flat if self._dtype is None else flat.to(self._dtype)

    def _sum(self, differences: Iterable[Tensor]) -> Tensor:
        """Add this rank's replicas as far as they form whole subtrees, and the rest across ranks."""
        sums: list[Tensor] = []
        for difference, merges in zip(differences, self._merges, strict=True):
            sums.append(difference)
            for _ in range(merges):
                newest = sums.pop()
                sums[-1].add_(newest)
        if self._world.size == 1:
            return sums[0]
        total = torch.empty_like(sums[0])
        exchange = choose_exchange(total, 0, self._shape, wire_device(self._world))
        exchange.start(sums, [])
        while not exchange.advance(total):
            pass
        return total


def buckets(values: list[Tensor]) -> Iterator[slice]:
    """Yield slices of neighbours to send together: one dtype, and at most `_BUCKET_BYTES` unless one tensor is larger."""
    begin = size = 0
    for end, value in enumerate(values):
        is_full = size + value.nbytes > _BUCKET_BYTES or value.dtype != values[begin].dtype
        if end > begin and is_full:
            yield slice(begin, end)
            begin, size = end, 0
        size += value.nbytes
    yield slice(begin, len(values))
