"""The backward pass of causal attention in two Triton kernels, the same bits in every run.

The first kernel computes the gradient of a block of queries, the second those of a block of keys and values. Each
result thus has one program that adds it up, in a fixed order: there are no atomic additions, and nothing waits. The
price is that scores are computed twice: seven products instead of five.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention_forward import (
    LOG2E,
    Blocks,
    load_rows,
    precision_of,
    store_rows,
    strides,
)

QUERIES = {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 2)}
KEYS = {64: Blocks(32, 64, 4, 3), 128: Blocks(32, 128, 8, 3)}
"""Block sizes of the two kernels, by head dimension."""
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _add_query_gradients(
    result, query, grad, log, delta, key_start, value_start, key_row, value_row,
    first_query, begin, end, length, scale,
    head_dim: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, even: tl.constexpr,
    masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Add what the keys from begin to end contribute to the gradient of a block of queries."""
    rows = first_query + tl.arange(0, queries)
    for first in range(begin, end, keys):
        key = load_rows(key_start, key_row, first, length, head_dim, keys, even)
        value = load_rows(value_start, value_row, first, length, head_dim, keys, even)
        scores = tl.dot(query, tl.trans(key), input_precision=precision)
        weights = tl.exp2(scores * scale - log[:, None])
        if masked:
            visible = rows[:, None] >= (first + tl.arange(0, keys))[None, :]
            weights = tl.where(visible, weights, 0.0)
        grad_weights = tl.dot(grad, tl.trans(value), input_precision=precision)
        grad_scores = (weights * (grad_weights - delta[:, None])).to(key.dtype)
        result = tl.dot(grad_scores, key, result, input_precision=precision)
    return result


@triton.jit
def _query_gradients(
    q, k, v, out, grad, logs, deltas, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, grad_batch, grad_head, grad_row, dq_batch, dq_head, dq_row,
    heads, length, scale, final_scale,
    head_dim: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, even: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one block of queries of one head, and its rows' sums of grad * out."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = first + tl.arange(0, queries)
    above = load_rows(
        grad + batch * grad_batch + head * grad_head,
        grad_row,
        first,
        length,
        head_dim,
        queries,
        even,
    )
    output = load_rows(
        out + batch * out_batch + head * out_head, out_row, first, length, head_dim, queries, even
    )
    delta = tl.sum(above.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(deltas + pair * length + rows, delta, mask=rows < length)
    log = tl.load(logs + pair * length + rows, mask=rows < length, other=0.0) * _LOG2E
    query = load_rows(
        q + batch * q_batch + head * q_head, q_row, first, length, head_dim, queries, even
    )
    key_start, value_start = (
        k + batch * k_batch + head * k_head,
        v + batch * v_batch + head * v_head,
    )
    result = tl.zeros([queries, head_dim], dtype=tl.float32)
    middle = (first + 1) // keys * keys  # every query of the block sees all keys before this one
    result = _add_query_gradients(
        result, query, above, log, delta, key_start, value_start, k_row, v_row, first, 0, middle,
        length, scale, head_dim, queries, keys, even, False, precision,
    )  # fmt: skip
    result = _add_query_gradients(
        result, query, above, log, delta, key_start, value_start, k_row, v_row, first, middle,
        tl.minimum(first + queries, length),
        length, scale, head_dim, queries, keys, even, True, precision,
    )  # fmt: skip
    start = dq + batch * dq_batch + head * dq_head
    store_rows(start, dq_row, first, length, result * final_scale, head_dim, queries, even)


@triton.jit
def _add_key_gradients(
    grad_key, grad_value, key, value, query_start, above_start, log_start, delta_start,
    query_row, above_row, first_key, begin, end, length, scale,
    head_dim: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, even: tl.constexpr,
    masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Add what the queries from begin to end contribute to the gradients of a block of keys.

    All scores are transposed: [keys, queries].
    """
    places = first_key + tl.arange(0, keys)
    for first in range(begin, end, queries):
        rows = first + tl.arange(0, queries)
        query = load_rows(query_start, query_row, first, length, head_dim, queries, even)
        above = load_rows(above_start, above_row, first, length, head_dim, queries, even)
        if even:
            log = tl.load(log_start + rows) * _LOG2E
            delta = tl.load(delta_start + rows)
        else:  # a query past the end gets the weight 2 ** -inf = 0
            log = tl.load(log_start + rows, mask=rows < length, other=float("inf")) * _LOG2E
            delta = tl.load(delta_start + rows, mask=rows < length, other=0.0)
        scores = tl.dot(key, tl.trans(query), input_precision=precision)
        weights = tl.exp2(scores * scale - log[None, :])
        if masked:
            weights = tl.where(rows[None, :] >= places[:, None], weights, 0.0)
        grad_value = tl.dot(weights.to(above.dtype), above, grad_value, input_precision=precision)
        grad_weights = tl.dot(value, tl.trans(above), input_precision=precision)
        grad_scores = (weights * (grad_weights - delta[None, :])).to(query.dtype)
        grad_key = tl.dot(grad_scores, query, grad_key, input_precision=precision)
    return grad_key, grad_value


@triton.jit
def _key_gradients(
    q, k, v, grad, logs, deltas, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    heads, length, scale, final_scale,
    head_dim: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, even: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one block of keys and values of one head."""
    first = tl.program_id(0) * keys
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    key = load_rows(k + batch * k_batch + head * k_head, k_row, first, length, head_dim, keys, even)
    value = load_rows(
        v + batch * v_batch + head * v_head, v_row, first, length, head_dim, keys, even
    )
    query_start, above_start = (
        q + batch * q_batch + head * q_head,
        grad + batch * grad_batch + head * grad_head,
    )
    log_start, delta_start = logs + pair * length, deltas + pair * length
    grad_key = tl.zeros([keys, head_dim], dtype=tl.float32)
    grad_value = tl.zeros([keys, head_dim], dtype=tl.float32)
    begin = first // queries * queries
    middle = (
        (first + keys + queries - 2) // queries * queries
    )  # queries from here see all keys of the block
    grad_key, grad_value = _add_key_gradients(
        grad_key, grad_value, key, value, query_start, above_start, log_start, delta_start,
        q_row, grad_row, first, begin, tl.minimum(middle, length),
        length, scale, head_dim, queries, keys, even, True, precision,
    )  # fmt: skip
    grad_key, grad_value = _add_key_gradients(
        grad_key, grad_value, key, value, query_start, above_start, log_start, delta_start,
        q_row, grad_row, first, middle, length,
        length, scale, head_dim, queries, keys, even, False, precision,
    )  # fmt: skip
    key_start, value_start = (
        dk + batch * dk_batch + head * dk_head,
        dv + batch * dv_batch + head * dv_head,
    )
    store_rows(key_start, dk_row, first, length, grad_key * final_scale, head_dim, keys, even)
    store_rows(value_start, dv_row, first, length, grad_value, head_dim, keys, even)


def query_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, logs: Tensor, grad: Tensor, dq: Tensor,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    """Write the gradient of the queries; return the sums of grad * out, which the keys need."""
    batch, heads, length, head_dim = dq.shape
    blocks = blocks or QUERIES[head_dim]
    deltas = torch.empty(batch, heads, length, device=dq.device)
    even = length % blocks.queries == 0 and length % blocks.keys == 0
    scale = 1 / math.sqrt(head_dim)
    _query_gradients[triton.cdiv(length, blocks.queries), batch * heads](
        *inputs, out, grad, logs, deltas, dq, *strides(*inputs, out, grad, dq),
        heads, length, scale * LOG2E, scale,
        head_dim, blocks.queries, blocks.keys, even, precision_of(dq),
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
    )  # fmt: skip
    return deltas


def key_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], deltas: Tensor, logs: Tensor, grad: Tensor,
    dk: Tensor, dv: Tensor, blocks: Blocks | None = None,
) -> None:  # fmt: skip
    """Write the gradients of keys and values."""
    batch, heads, length, head_dim = dk.shape
    blocks = blocks or KEYS[head_dim]
    even = length % blocks.queries == 0 and length % blocks.keys == 0
    scale = 1 / math.sqrt(head_dim)
    _key_gradients[triton.cdiv(length, blocks.keys), batch * heads](
        *inputs, grad, logs, deltas, dk, dv, *strides(*inputs, grad, dk, dv),
        heads, length, scale * LOG2E, scale,
        head_dim, blocks.queries, blocks.keys, even, precision_of(dk),
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
    )  # fmt: skip


def backward_into(
    inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, logs: Tensor, grad: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write the gradients of queries, keys and values [batch, heads, length, head dim].

    Any strides will do if the head dimension is contiguous; logs [batch, heads, length] are contiguous.
    """
    dq, dk, dv = gradients
    deltas = query_gradients(inputs, out, logs, grad, dq)
    key_gradients(inputs, deltas, logs, grad, dk, dv)
