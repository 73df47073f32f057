"""Causal attention as a Triton kernel, which also returns the log-sum-exp of every row of scores.

Block sizes by head dimension are those that were fastest on an H200; other sizes add in another order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2.0))


class Blocks(NamedTuple):
    """How a kernel is cut."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """The most registers a thread may have; None: as many as the compiler takes."""

    def __str__(self) -> str:
        limit = f", {self.registers} registers" if self.registers else ""
        return f"{self.queries} x {self.keys}, {self.warps} warps, {self.stages} stages{limit}"


FORWARD = {64: Blocks(64, 64, 4, 3), 128: Blocks(128, 64, 8, 3)}


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and position of tensors [batch, heads, length, head dim]."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "head dim must be contiguous"
    return tuple(step for tensor in tensors for step in tensor.stride()[:3])


def precision_of(tensor: Tensor) -> str:
    """Return how products are computed: fp32, which only the tests use, as fp32."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


@triton.jit
def load_rows(
    start, row_stride, first, length,
    head_dim: tl.constexpr, block: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Return a block of rows; those past the end are zero."""
    rows = first + tl.arange(0, block)
    pointers = start + rows[:, None] * row_stride + tl.arange(0, head_dim)[None, :]
    if even:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(rows < length)[:, None], other=0.0)
    return values


@triton.jit
def store_rows(
    start, row_stride, first, length, values,
    head_dim: tl.constexpr, block: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Write the rows of a block that are not past the end."""
    rows = first + tl.arange(0, block)
    pointers = start + rows[:, None] * row_stride + tl.arange(0, head_dim)[None, :]
    values = values.to(start.dtype.element_ty)
    if even:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(rows < length)[:, None])


@triton.jit
def _attend(
    result, largest, total, query, key_start, value_start, key_row, value_row,
    first_query, begin, end, length, scale,
    head_dim: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, even: tl.constexpr,
    masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Add the values of the keys from begin to end, with weights of two to the power of the scores."""
    rows = first_query + tl.arange(0, queries)
    for first in range(begin, end, keys):
        key = load_rows(key_start, key_row, first, length, head_dim, keys, even)
        scores = tl.dot(query, tl.trans(key), input_precision=precision) * scale
        if masked:
            visible = rows[:, None] >= (first + tl.arange(0, keys))[None, :]
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        value = load_rows(value_start, value_row, first, length, head_dim, keys, even)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(value.dtype), value, result, input_precision=precision)
        largest = higher
    return result, largest, total


@triton.jit
def _forward(
    q, k, v, out, logs,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row,
    heads, length, scale,
    head_dim: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, even: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write output and log-sum-exp of one block of queries of one head."""
    # The last block has the most keys; starting with it leaves short ones for the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    key_start, value_start = (
        k + batch * k_batch + head * k_head,
        v + batch * v_batch + head * v_head,
    )
    query = load_rows(
        q + batch * q_batch + head * q_head, q_row, first, length, head_dim, queries, even
    )
    result = tl.zeros([queries, head_dim], dtype=tl.float32)
    largest = tl.full([queries], -float("inf"), dtype=tl.float32)
    total = tl.zeros([queries], dtype=tl.float32)
    middle = (first + 1) // keys * keys  # every query of the block sees all keys before this one
    result, largest, total = _attend(
        result, largest, total, query, key_start, value_start, k_row, v_row,
        first, 0, middle, length, scale, head_dim, queries, keys, even, False, precision,
    )  # fmt: skip
    result, largest, total = _attend(
        result, largest, total, query, key_start, value_start, k_row, v_row,
        first, middle, tl.minimum(first + queries, length), length, scale,
        head_dim, queries, keys, even, True, precision,
    )  # fmt: skip
    start = out + batch * out_batch + head * out_head
    store_rows(start, out_row, first, length, result / total[:, None], head_dim, queries, even)
    rows = first + tl.arange(0, queries)
    tl.store(logs + pair * length + rows, (largest + tl.log2(total)) * LN2, mask=rows < length)


def forward(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks | None = None) -> tuple[Tensor, Tensor]:
    """Return output [batch, heads, length, head dim] and log-sum-exp [batch, heads, length].

    The memory of the output has the order [batch, length, heads, head dim].
    """
    batch, heads, length, head_dim = q.shape
    blocks = blocks or FORWARD[head_dim]
    out = q.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    logs = torch.empty(batch, heads, length, device=q.device)
    even = length % blocks.queries == 0 and length % blocks.keys == 0
    _forward[triton.cdiv(length, blocks.queries), batch * heads](
        q, k, v, out, logs, *strides(q, k, v, out), heads, length, LOG2E / math.sqrt(head_dim),
        head_dim, blocks.queries, blocks.keys, even, precision_of(q),
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
    )  # fmt: skip
    return out, logs
