"""The candidates for causal attention: as a whole, and kernel by kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from parts.measuring import Candidate, Part, Step
from parts.shapes import Sizes
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import deterministic

from paceline.kernels import attention_backward, attention_forward
from paceline.kernels.attention import attend, parts_of
from paceline.kernels.attention_forward import Blocks

_CHECKED_BATCH = 2
_FORWARD = [
    Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 4), Blocks(64, 32, 4, 3), Blocks(64, 32, 4, 4),
    Blocks(64, 64, 8, 3), Blocks(128, 32, 4, 3), Blocks(128, 64, 8, 3),
]  # fmt: skip
_QUERIES = [
    Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 4), Blocks(64, 32, 4, 3),
    Blocks(64, 32, 4, 4), Blocks(128, 32, 8, 3), Blocks(128, 32, 4, 3),
]  # fmt: skip
_KEYS = [
    Blocks(64, 64, 4, 3), Blocks(32, 64, 4, 2), Blocks(32, 64, 4, 4), Blocks(32, 64, 4, 5),
    Blocks(32, 32, 4, 3), Blocks(64, 32, 4, 3), Blocks(16, 64, 4, 4), Blocks(32, 128, 8, 4),
]  # fmt: skip
"""Other block sizes for heads of 64."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Case:
    """qkv as a GPT's linear layer leaves it, and the gradient from above."""

    def __init__(self, sizes: Sizes) -> None:
        shape = sizes.batch, sizes.length, 3, sizes.heads, sizes.head_dim
        self.qkv = sizes.random(*shape).requires_grad_()
        self.above = sizes.random(*shape[:2], *shape[3:], std=0.1).transpose(1, 2)
        self.parts = [part.detach().requires_grad_() for part in parts_of(self.qkv.detach())]

    def step(self, attention: Attention) -> Step:
        """Return attention of separate q, k and v; the gradients are not assembled to one of qkv."""

        def run() -> Sequence[Tensor]:
            out = attention(*self.parts)
            return out, *torch.autograd.grad(out, self.parts, self.above)

        return run

    def qkv_step(self, attention: Callable[[Tensor], Tensor]) -> Step:
        """Return attention [batch, heads, length, head dim] of qkv as a whole."""

        def run() -> Sequence[Tensor]:
            out = attention(self.qkv)
            (gradient,) = torch.autograd.grad(out, self.qkv, self.above)
            return out, *parts_of(gradient)

        return run

    def expected(self) -> Sequence[Tensor]:
        few = [part.detach()[:_CHECKED_BATCH].double().requires_grad_() for part in self.parts]
        out = formula(*few)
        above = self.above[:_CHECKED_BATCH].double()
        return out.detach(), *torch.autograd.grad(out, few, above)


def _sdpa(*backends: SDPBackend) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not backends:
            return scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(list(backends)):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def _deterministically(step: Step) -> Step:
    def run() -> Sequence[Tensor]:
        before = deterministic.fill_uninitialized_memory
        deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(mode=True)
        try:
            return step()
        finally:
            torch.use_deterministic_algorithms(mode=False)
            deterministic.fill_uninitialized_memory = before

    return run


def _flex(sizes: Sizes) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, sizes.length, sizes.length, device=sizes.device)
    compiled: Any = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention in the dtype of the inputs."""
    length, head_dim = query.shape[-2:]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-1, -2) / math.sqrt(head_dim)).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value


def whole_parts(sizes: Sizes) -> list[Part]:
    """Return attention, forward and backward."""
    case = _Case(sizes)

    def sdpa_of_qkv(qkv: Tensor) -> Tensor:
        return scaled_dot_product_attention(*parts_of(qkv), is_causal=True)

    part = Part(
        "attention",
        [
            Candidate("SDPA, and one gradient", lambda: case.qkv_step(sdpa_of_qkv)),
            Candidate(
                "the same, deterministic",
                lambda: _deterministically(case.qkv_step(sdpa_of_qkv)),
            ),
            Candidate("SDPA, cuDNN", lambda: case.step(_sdpa(SDPBackend.CUDNN_ATTENTION))),
            Candidate("SDPA, flash", lambda: case.step(_sdpa(SDPBackend.FLASH_ATTENTION))),
            Candidate("flex_attention", lambda: case.step(_flex(sizes))),
            Candidate(
                "ours",
                lambda: case.qkv_step(lambda qkv: attend(qkv)[0].transpose(1, 2)),
            ),
        ],
        case.expected,
    )
    return [part]


def kernel_parts(sizes: Sizes) -> list[Part]:
    """Return each of the three Triton kernels with each choice of blocks; the default is the first."""
    case = _Case(sizes)
    head_dim = sizes.head_dim
    inputs = tuple(part.detach() for part in case.parts)
    out, logs = attention_forward.forward(*inputs)
    dq, dk, dv = parts_of(torch.empty_like(case.qkv, requires_grad=False))
    deltas = attention_backward.query_gradients(inputs, out, logs, case.above, dq)

    def forward(blocks: Blocks) -> Step:
        return lambda: attention_forward.forward(*inputs, blocks)

    def of_queries(blocks: Blocks) -> Step:
        def run() -> Sequence[Tensor]:
            attention_backward.query_gradients(inputs, out, logs, case.above, dq, blocks)
            return [dq]

        return run

    def of_keys(blocks: Blocks) -> Step:
        def run() -> Sequence[Tensor]:
            attention_backward.key_gradients(inputs, deltas, logs, case.above, dk, dv, blocks)
            return dk, dv

        return run

    kinds = [
        ("kernel: forward", forward, attention_forward.FORWARD, _FORWARD),
        ("kernel: dQ", of_queries, attention_backward.QUERIES, _QUERIES),
        ("kernel: dK, dV", of_keys, attention_backward.KEYS, _KEYS),
    ]
    return [
        Part(
            name,
            [
                Candidate(str(blocks), lambda make=make, blocks=blocks: make(blocks))
                for blocks in (default[head_dim], *choices)
            ],
        )
        for name, make, default, choices in kinds
    ]
