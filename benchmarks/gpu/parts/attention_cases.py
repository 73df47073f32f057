"""The candidates for causal attention: as a whole, and kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from parts import attention_backward, attention_forward, attention_op
from parts.attention_forward import Blocks
from parts.cudnn_attention import cudnn_step
from parts.measuring import Candidate, Part, Step
from parts.shapes import Sizes
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import deterministic

_CHECKED_BATCH = 2
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Case:
    """qkv as a GPT's linear layer leaves it, and the gradient from above."""

    def __init__(self, sizes: Sizes) -> None:
        shape = sizes.batch, sizes.length, 3, sizes.heads, sizes.head_dim
        self.qkv = sizes.random(*shape).requires_grad_()
        self.above = sizes.random(*shape[:2], *shape[3:], std=0.1).transpose(1, 2)
        self.parts = [
            part.detach().requires_grad_() for part in attention_op.parts_of(self.qkv.detach())
        ]

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
            return out, *attention_op.parts_of(gradient)

        return run

    def expected(self) -> Sequence[Tensor]:
        few = [part.detach()[:_CHECKED_BATCH].double().requires_grad_() for part in self.parts]
        out, _ = attention_op.formula(*few)
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


def _flash_package(version: int) -> Attention:
    """Return FlashAttention 3 or 4 with a deterministic backward, if it is installed."""
    if version == 3:
        from flash_attn_interface import flash_attn_func
    else:
        from flash_attn.cute import flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        swapped = [part.transpose(1, 2) for part in (q, k, v)]
        found = flash_attn_func(*swapped, causal=True, deterministic=True)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return run


def whole_parts(sizes: Sizes) -> list[Part]:
    """Return attention, forward and backward."""
    case = _Case(sizes)

    def sdpa_of_qkv(qkv: Tensor) -> Tensor:
        return scaled_dot_product_attention(*attention_op.parts_of(qkv), is_causal=True)

    def own(forward: str) -> Callable[[], Step]:
        return lambda: case.qkv_step(lambda qkv: attention_op.attend(qkv, forward).transpose(1, 2))

    part = Part(
        "attention",
        [
            Candidate("today, free: SDPA", lambda: case.step(_sdpa())),
            Candidate("today, exact: SDPA", lambda: _deterministically(case.step(_sdpa()))),
            Candidate("SDPA, and one gradient", lambda: case.qkv_step(sdpa_of_qkv)),
            Candidate("SDPA, cuDNN", lambda: case.step(_sdpa(SDPBackend.CUDNN_ATTENTION))),
            Candidate("SDPA, flash", lambda: case.step(_sdpa(SDPBackend.FLASH_ATTENTION))),
            Candidate("cuDNN forward, own backward", own("cudnn")),
            Candidate("flash forward, own backward", own("flash")),
            Candidate("own forward, own backward", own("triton")),
            Candidate("flex_attention", lambda: case.step(_flex(sizes))),
            Candidate("FA3, deterministic", lambda: case.step(_flash_package(3))),
            Candidate("FA4, deterministic", lambda: case.step(_flash_package(4))),
            Candidate("cudnn-frontend, deterministic", lambda: cudnn_step(case.parts, case.above)),
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
    dq, dk, dv = attention_op.parts_of(torch.empty_like(case.qkv, requires_grad=False))
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
        ("kernel: forward", forward, attention_forward.FORWARD, attention_forward.FORWARD_CHOICES),
        ("kernel: dQ", of_queries, attention_backward.QUERIES, attention_backward.QUERIES_CHOICES),
        ("kernel: dK, dV", of_keys, attention_backward.KEYS, attention_backward.KEYS_CHOICES),
    ]
    return [
        Part(
            name,
            [
                Candidate(str(blocks), lambda make=make, blocks=blocks: make(blocks))
                for blocks in (default[head_dim], *choices[head_dim])
            ],
        )
        for name, make, default, choices in kinds
    ]
