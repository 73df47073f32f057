"""A small GPT: learned positions, causal attention, GELU, LayerNorm before each part, the head tied to the embedding."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Shape(NamedTuple):
    """How large a GPT is."""

    layers: int
    heads: int
    width: int


SHAPES = {
    "nano": Shape(3, 3, 48),
    "mini": Shape(6, 6, 192),
    "124M": Shape(12, 12, 768),
    "350M": Shape(24, 16, 1024),
    "774M": Shape(36, 20, 1280),
    "1.5B": Shape(48, 25, 1600),
}


class Block(nn.Module):
    """Attention, then two linear layers, each added to what came in."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next layer's input."""
        hidden = hidden + self.drop(self.out(self._attend(self.norm1(hidden))))
        result: Tensor = hidden + self.drop(self.down(gelu(self.up(self.norm2(hidden)))))
        return result

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        dropout = self.dropout if self.training else 0.0
        found = scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return found.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """Scores of the next token, at every place of a text."""

    def __init__(self, shape: Shape, tokens: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(tokens, shape.width), nn.Embedding(length, shape.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_start)
        for name, value in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # many are added up: each starts smaller
                nn.init.normal_(value, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [batch, length, tokens]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.drop(self.embedding(tokens) + self.position(places))
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.norm(hidden) @ self.embedding.weight.T
        return scores


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
