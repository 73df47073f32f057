"""A GPT: causal attention and two linear layers in each block, each added to what came in; the head tied to the embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from paceline.recipes.gpt_kv_cache import BlockKVCache, KVCache


class Shape(NamedTuple):
    """How large a GPT is."""

    layers: int
    heads: int
    embedding_dim: int


SHAPES = {
    "nano": Shape(3, 3, 48),
    "mini": Shape(6, 6, 192),
    "124M": Shape(12, 12, 768),
    "350M": Shape(24, 16, 1024),
    "774M": Shape(36, 20, 1280),
    "1.5B": Shape(48, 25, 1600),
}
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Design:
    """What a GPT is made of. These are GPT-2's own choices."""

    shape: Shape
    vocab_size: int
    context_length: int
    positions: str = "learned"
    """learned: a vector for every place; rotary: queries and keys are turned by an angle that grows with the place."""
    activation: str = "gelu"
    """gelu, GPT-2's (by tanh), or relu2: the square of the positive part."""
    norm: str = "layer"
    """layer, or rms: without mean and bias."""
    bias: bool = True
    """Whether linear layers and norms have one."""
    dropout: float = 0.0
    recompute: bool = False
    """Whether blocks are computed again in backward, instead of kept."""


class Block(nn.Module):
    """Attention, then two linear layers, each added to what came in."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        width, bias = design.shape.embedding_dim, design.bias
        self.heads, self.dropout, self.activation = (
            design.shape.heads,
            design.dropout,
            design.activation,
        )
        self.norm1, self.norm2 = make_norm(design), make_norm(design)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=bias),
            nn.Linear(width, width, bias=bias),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=bias),
            nn.Linear(4 * width, width, bias=bias),
        )
        self.drop = nn.Dropout(design.dropout)

    def forward(
        self, hidden: Tensor, angles: Tensor | None = None, memory: BlockKVCache | None = None
    ) -> Tensor:
        """Return the next layer's input."""
        hidden = hidden + self.drop(self.out(self._attend(self.norm1(hidden), angles, memory)))
        inside = self.up(self.norm2(hidden))
        inside = (
            relu(inside).square()
            if self.activation == "relu2"
            else gelu(inside, approximate="tanh")
        )
        result: Tensor = hidden + self.drop(self.down(inside))
        return result

    def _attend(self, hidden: Tensor, angles: Tensor | None, memory: BlockKVCache | None) -> Tensor:
        batch, length, width = hidden.shape
        split = (
            self.qkv(hidden)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        query, key, value = split.unbind(0)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if memory is not None:
            key, value = memory.extended(key, value)
        causal = memory is None or length > 1  # one more place may look at all that are remembered
        dropout = self.dropout if self.training else 0.0
        found = scaled_dot_product_attention(query, key, value, is_causal=causal, dropout_p=dropout)
        return found.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """Scores of the next token, at every place of a text."""

    angles: Tensor | None

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.embedding = nn.Embedding(design.vocab_size, design.shape.embedding_dim)
        learned = design.positions == "learned"
        self.position = (
            nn.Embedding(design.context_length, design.shape.embedding_dim) if learned else None
        )
        self.register_buffer("angles", None if learned else rotary_angles(design), persistent=False)
        self.drop = nn.Dropout(design.dropout)
        self.blocks = nn.ModuleList(Block(design) for _ in range(design.shape.layers))
        self.norm = make_norm(design)
        self.apply(_start)
        for name, value in self.named_parameters():
            if name.endswith(
                ("out.weight", "down.weight")
            ):  # many are added up: each starts smaller
                nn.init.normal_(value, std=0.02 / math.sqrt(2 * design.shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [batch, length, tokens]."""
        hidden, angles = self._placed(tokens, 0)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(
                torch.get_autocast_dtype(kind)
            )  # else all that is added up would stay twice as wide
        hidden = self.drop(hidden)
        for block in self.blocks:
            if self.design.recompute and self.training:
                # Random states are kept only where there is dropout: a graph cannot be captured while they are.
                kept = self.design.dropout > 0
                hidden = checkpoint(
                    block, hidden, angles, use_reentrant=False, preserve_rng_state=kept
                )
            else:
                hidden = block(hidden, angles)
        return self._scores(hidden)

    def read_on(self, tokens: Tensor, memory: KVCache) -> Tensor:
        """Return scores [batch, tokens] of what comes after tokens that follow those in memory: a whole text, or one more."""
        hidden, angles = self._placed(tokens, memory.seen)
        for block, remembered in zip(self.blocks, memory.blocks, strict=True):
            hidden = block(hidden, angles, remembered)
        return self._scores(hidden[:, -1])

    def _placed(self, tokens: Tensor, begin: int) -> tuple[Tensor, Tensor | None]:
        """Return what the first block gets: vectors of tokens at their places, or with them the angles of these places."""
        places = slice(begin, begin + tokens.shape[1])
        hidden = self.embedding(tokens)
        if self.position is not None:
            hidden = hidden + self.position.weight[places]
        return hidden, None if self.angles is None else self.angles[places]

    def _scores(self, hidden: Tensor) -> Tensor:
        scores: Tensor = nn.functional.linear(self.norm(hidden), self.embedding.weight)
        return scores


def flops_per_sequence(design: Design, parameters: int) -> float:
    """Return the operations of forward and backward for a row: 6 for each weight that is multiplied, 12 for each score's width.

    >>> round(flops_per_sequence(Design(SHAPES["124M"], 50304, 1024), 124_475_904) / 1e9)
    876
    """
    layers, _, width = design.shape
    unused = design.context_length * width if design.positions == "learned" else 0
    return design.context_length * (
        6.0 * (parameters - unused) + 12.0 * layers * width * design.context_length
    )


def make_norm(design: Design) -> nn.Module:
    """Return a norm over the width."""
    if design.norm == "rms":
        return nn.RMSNorm(design.shape.embedding_dim, eps=1e-6)
    return nn.LayerNorm(design.shape.embedding_dim, bias=design.bias)


def rotary_angles(design: Design) -> Tensor:
    """Return cosine and sine of the angle by which each pair of numbers is turned, at every place: [length, 2, pairs]."""
    size = design.shape.embedding_dim // design.shape.heads
    speeds = _ROTARY_BASE ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(design.context_length, dtype=torch.float64), speeds)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def rotate(values: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of [batch, heads, length, size] by the angles of their places.

    >>> x = torch.randn(1, 1, 3, 4)
    >>> still = torch.stack([torch.ones(3, 2), torch.zeros(3, 2)], dim=1)
    >>> torch.equal(rotate(x, still), x)
    True
    """
    cosine, sine = angles.to(values.dtype).unbind(1)
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
