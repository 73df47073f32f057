"""KV cache: keys and values of past positions, so that generating a token costs one position."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockKVCache:
    """Keys and values of one block: [batch, heads, positions, head size]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.positions = keys, values, 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the next positions; return those of all positions so far."""
        begin = self.positions
        self.positions = end = begin + keys.shape[2]
        assert begin == 0 or end == begin + 1, "appending several positions needs another mask"
        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """Caches of all blocks, for a batch of sequences of equal length."""

    def __init__(
        self, layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate keys and values of `shape` [batch, heads, context length, head size] per layer."""
        self.blocks = []
        for _ in range(layers):
            keys, values = torch.empty((2, *shape), dtype=dtype, device=device).unbind(0)
            self.blocks.append(BlockKVCache(keys, values))

    @property
    def positions(self) -> int:
        """The number of positions in the cache."""
        return self.blocks[0].positions

    def clear(self) -> None:
        """Start another sequence."""
        for block in self.blocks:
            block.positions = 0
