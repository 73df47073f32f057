"""GPT: a decoder-only transformer with pre-norm blocks and tied input and output embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from paceline.kernels.attention import causal_attention
from paceline.kernels.linear import Linear, gelu_mlp, linear
from paceline.recipes.gpt_kv_cache import BlockKVCache, KVCache


class Shape(NamedTuple):
    """Layers, attention heads and embedding width of a GPT."""

    layers: int
    heads: int
    embedding_dim: int

    @property
    def head_dim(self) -> int:
        """The size of the queries, keys and values of one attention head."""
        return self.embedding_dim // self.heads


SHAPES = {
    "nano": Shape(3, 3, 48),
    "mini": Shape(6, 6, 192),
    "124M": Shape(12, 12, 768),
    "350M": Shape(24, 16, 1024),
    "774M": Shape(36, 20, 1280),
    "1.5B": Shape(48, 25, 1600),
}
_ROTARY_BASE = 10_000.0
_STD = 0.02  # of initial weights


@dataclass(frozen=True)
class Design:
    """The architecture of a GPT. The defaults are those of GPT-2."""

    shape: Shape
    vocab_size: int
    context_length: int
    positions: str = "learned"
    """learned: positional embeddings; rotary: rotary position embeddings (RoPE)."""
    activation: str = "gelu"
    """gelu (tanh approximation, as in GPT-2), or relu2: squared ReLU."""
    norm: str = "layer"
    """layer: LayerNorm; rms: RMSNorm."""
    bias: bool = True
    """Whether linear layers and norms have biases."""
    dropout: float = 0.0
    recompute: bool = False
    """Activation checkpointing: recompute each block in the backward pass."""
    fp8_head: bool = False
    """While training, return what `fp8_head.head_loss` takes, instead of logits."""


class HeadInput(NamedTuple):
    """The input of an output layer that is computed together with the loss."""

    hidden: Tensor
    weight: Tensor


class Block(nn.Module):
    """One transformer layer: causal self-attention, then an MLP, each with a residual connection."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        width, bias = design.shape.embedding_dim, design.bias
        self.heads = design.shape.heads
        self.dropout = design.dropout
        self.activation = design.activation
        self.norm1 = make_norm(design)
        self.norm2 = make_norm(design)
        residual_std = _STD / math.sqrt(2 * design.shape.layers)
        self.qkv = _linear(width, 3 * width, bias=bias)
        self.out = _linear(width, width, bias=bias, std=residual_std)
        self.up = _linear(width, 4 * width, bias=bias)
        self.down = _linear(4 * width, width, bias=bias, std=residual_std)
        self.drop = nn.Dropout(design.dropout)

    def forward(
        self, hidden: Tensor, angles: Tensor | None = None, cache: BlockKVCache | None = None
    ) -> Tensor:
        """Return the hidden states after this layer."""
        hidden = hidden + self.drop(self.out(self._attend(self.norm1(hidden), angles, cache)))
        result: Tensor = hidden + self.drop(self._transform(self.norm2(hidden)))
        return result

    def _transform(self, hidden: Tensor) -> Tensor:
        if self.activation == "gelu":
            return gelu_mlp(hidden, self.up, self.down)
        result: Tensor = self.down(relu(self.up(hidden)).square())
        return result

    def _attend(self, hidden: Tensor, angles: Tensor | None, cache: BlockKVCache | None) -> Tensor:
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        dropout = self.dropout if self.training else 0.0
        if angles is None and cache is None:
            return causal_attention(split, dropout).reshape(batch, length, width)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if cache is not None:
            key, value = cache.append(key, value)
        causal = cache is None or length > 1  # a single new position attends to all cached ones
        heads = scaled_dot_product_attention(query, key, value, is_causal=causal, dropout_p=dropout)
        return heads.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """Predicts the next token at every position of a sequence."""

    angles: Tensor | None

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        width = design.shape.embedding_dim
        learned = design.positions == "learned"
        self.embedding = _embedding(design.vocab_size, width)
        self.position = _embedding(design.context_length, width) if learned else None
        self.register_buffer("angles", None if learned else rotary_angles(design), persistent=False)
        self.drop = nn.Dropout(design.dropout)
        self.blocks = nn.ModuleList(Block(design) for _ in range(design.shape.layers))
        self.norm = make_norm(design)

    def forward(self, tokens: Tensor) -> Tensor | HeadInput:
        """Return logits [batch, length, vocabulary]; with `fp8_head`, while training, what they are computed from."""
        hidden, angles = self._embed(tokens, 0)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            # Otherwise the residual stream would stay in fp32.
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        hidden = self.drop(hidden)
        for block in self.blocks:
            if self.design.recompute and self.training:
                # Only dropout needs RNG states, which prevent the capture of a CUDA graph.
                has_dropout = self.design.dropout > 0
                hidden = checkpoint(
                    block, hidden, angles, use_reentrant=False, preserve_rng_state=has_dropout
                )
            else:
                hidden = block(hidden, angles)
        if self.design.fp8_head and self.training:
            return HeadInput(self.norm(hidden), self.embedding.weight)
        return self._logits(hidden)

    def next_logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Return logits [batch, vocabulary] after a prompt or one token, which extends the cache."""
        hidden, angles = self._embed(tokens, cache.positions)
        for block, block_cache in zip(self.blocks, cache.blocks, strict=True):
            hidden = block(hidden, angles, block_cache)
        return self._logits(hidden[:, -1])

    def new_cache(self, batch: int) -> KVCache:
        """Return an empty KV cache for a batch of sequences."""
        shape, weight = self.design.shape, self.embedding.weight
        size = (batch, shape.heads, self.design.context_length, shape.head_dim)
        return KVCache(shape.layers, size, weight.dtype, weight.device)

    def _embed(self, tokens: Tensor, begin: int) -> tuple[Tensor, Tensor | None]:
        """Return the input of the first block, and the rotary angles if there are any."""
        positions = slice(begin, begin + tokens.shape[1])
        hidden = self.embedding(tokens)
        if self.position is not None:
            hidden = hidden + self.position.weight[positions]
        return hidden, None if self.angles is None else self.angles[positions]

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(self.norm(hidden), self.embedding.weight)


def flops_per_sequence(design: Design, parameters: int) -> float:
    """Return the FLOPs of forward and backward.

    6 per weight and token, 12 per layer, unit of width and pair of tokens.

    >>> round(flops_per_sequence(Design(SHAPES["124M"], 50304, 1024), 124_475_904) / 1e9)
    876
    """
    layers, _, width = design.shape
    length = design.context_length
    unused = length * width if design.positions == "learned" else 0
    return length * (6.0 * (parameters - unused) + 12.0 * layers * width * length)


def make_norm(design: Design) -> nn.Module:
    """Return a LayerNorm or RMSNorm over the embedding width."""
    if design.norm == "rms":
        return nn.RMSNorm(design.shape.embedding_dim, eps=1e-6)
    return nn.LayerNorm(design.shape.embedding_dim, bias=design.bias)


def rotary_angles(design: Design) -> Tensor:
    """Return cosines and sines of the rotary embedding: [context length, 2, head size / 2]."""
    size = design.shape.head_dim
    frequencies = _ROTARY_BASE ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    positions = torch.arange(design.context_length, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def rotate(values: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embeddings to the pairs (i, i + half) of [batch, heads, length, head size].

    >>> x = torch.randn(1, 1, 3, 4)
    >>> zero_angle = torch.stack([torch.ones(3, 2), torch.zeros(3, 2)], dim=1)
    >>> torch.equal(rotate(x, zero_angle), x)
    True
    """
    cosine, sine = angles.to(values.dtype).unbind(1)
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def _linear(inputs: int, outputs: int, *, bias: bool, std: float = _STD) -> Linear:
    """Return a linear layer with normally distributed weights, without computing those that torch begins with."""
    layer: Linear = skip_init(Linear, inputs, outputs, bias=bias)  # type: ignore[no-untyped-call]
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _embedding(count: int, width: int) -> nn.Embedding:
    layer: nn.Embedding = skip_init(nn.Embedding, count, width)  # type: ignore[no-untyped-call]
    nn.init.normal_(layer.weight, std=_STD)
    return layer
