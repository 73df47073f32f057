"""How far replicas have walked from where they set out: the mean of all ranks' replicas, added in one fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.train.bucket_exchange import TreeShape, choose_exchange
from paceline.world.collectives import wire_device
from paceline.world.world import World

_BUCKET_BYTES = 32 << 20  # an exchange holds a few copies of what it sends
_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OuterGradient:
    """The mean over all replicas of start minus weights. All ranks call it together, and get the same bits in any world.

    With compression a way is rounded before it is sent, and so is every sum of the tree, in a world of one as well.
    """

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._replicas = world, config.local_sgd.replicas
        self._dtype = _SHORT.get(config.compression)
        self._merges = merges_after(share(self._replicas, world.rank, world.size), self._replicas)
        self._shape = TreeShape.of(self._replicas, world)

    def __call__(self, start: list[Tensor], replicas: list[list[Tensor]]) -> list[Tensor]:
        """Return the mean way of each weight, given where all set out and where the replicas of this rank are."""
        found: list[Tensor] = []
        for part in buckets(start):
            ways = (self._way(start[part], weights[part]) for weights in replicas)
            mean = self._sum(ways).to(start[part][0].dtype).div_(self._replicas)
            pieces = torch.split(mean, [value.numel() for value in start[part]])
            found += [
                piece.view_as(value) for piece, value in zip(pieces, start[part], strict=True)
            ]
        return found

    def _way(self, start: list[Tensor], weights: list[Tensor]) -> Tensor:
        way = torch.cat(
            [(here - there).flatten() for here, there in zip(start, weights, strict=True)]
        )
        return way if self._dtype is None else way.to(self._dtype)

    def _sum(self, ways: Iterable[Tensor]) -> Tensor:
        """Add this rank's replicas as far as they form whole subtrees, and the rest across ranks."""
        sums: list[Tensor] = []
        for way, merges in zip(ways, self._merges, strict=True):
            sums.append(way)
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
    """Yield which neighbours travel together: of one type, and of no more than so many bytes unless one alone has more."""
    begin = size = 0
    for end, value in enumerate(values):
        if end > begin and (
            size + value.nbytes > _BUCKET_BYTES or value.dtype != values[begin].dtype
        ):
            yield slice(begin, end)
            begin, size = end, 0
        size += value.nbytes
    yield slice(begin, len(values))
