"""What a GPT that writes remembers of a text: keys and values of every place, so that the next token costs one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.recipes.gpt_model import GPT


class BlockKVCache:
    """Keys and values of one block: [rows, heads, places, numbers]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.seen = keys, values, 0

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next places; return those of all places so far."""
        begin, self.seen = self.seen, self.seen + keys.shape[2]
        assert begin == 0 or self.seen == begin + 1, (
            "several places at once would need a mask of their own"
        )
        self.keys[:, :, begin : self.seen], self.values[:, :, begin : self.seen] = keys, values
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]


class KVCache:
    """Room for as many places as a GPT looks back, in so many texts of equal length."""

    def __init__(self, model: GPT, rows: int) -> None:
        shape, weight = model.design.shape, model.embedding.weight
        room = (
            2,
            rows,
            shape.heads,
            model.design.context_length,
            shape.embedding_dim // shape.heads,
        )
        made = (
            torch.empty(room, dtype=weight.dtype, device=weight.device) for _ in range(shape.layers)
        )
        self.blocks = [BlockKVCache(*both.unbind(0)) for both in made]

    @property
    def seen(self) -> int:
        """How many places it holds."""
        return self.blocks[0].seen

    def forget(self) -> None:
        """Make room for another text."""
        for block in self.blocks:
            block.seen = 0
