"""Causal attention whose backward pass has the same bits in every run, at the speed of the fastest one that has not."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_HAS_TRITON = find_spec("triton") is not None
_HEAD_DIMS = (64, 128)


def causal_attention(qkv: Tensor, dropout: float = 0.0) -> Tensor:
    """Return causal self-attention [batch, length, heads, head dim] of queries, keys and values in one tensor.

    - `qkv`: [batch, length, 3, heads, head dim], as one linear layer computes them.
    - `dropout`: the probability with which an attention weight is dropped; 0 in evaluation.

    In bf16 on a GPU, with heads of 64 or 128 and without dropout, three Triton kernels compute it. Their backward pass has
    the same bits in every run, so `exact=true` costs no time. Everything else is torch's `scaled_dot_product_attention`.

    >>> qkv = torch.randn(2, 5, 3, 4, 8)  # five tokens, four heads of 8
    >>> causal_attention(qkv).shape
    torch.Size([2, 5, 4, 8])
    """
    if _HAS_TRITON and not dropout and _has_kernels(qkv):
        out: Tensor = attend(qkv)[0]
        return out
    query, key, value = parts_of(qkv)
    found = scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
    return found.transpose(1, 2)


def parts_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [batch, heads, length, head dim] of queries, keys and values."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _has_kernels(qkv: Tensor) -> bool:
    return qkv.is_cuda and qkv.dtype == torch.bfloat16 and qkv.shape[-1] in _HEAD_DIMS


# An operator that torch.compile keeps in its graph. The gradient has the layout of qkv, so that no copy follows.


@torch.library.custom_op("paceline::causal_attention", mutates_args=())
def attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [batch, length, heads, head dim] and log-sum-exp [batch, heads, length]."""
    from paceline.kernels.attention_forward import forward

    out, logs = forward(*parts_of(qkv))
    return out.transpose(1, 2), logs


@attend.register_fake
def _(qkv: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, _, heads, head_dim = qkv.shape
    logs = qkv.new_empty(batch, heads, length, dtype=torch.float32)
    return qkv.new_empty(batch, length, heads, head_dim), logs


@torch.library.custom_op("paceline::causal_attention_backward", mutates_args=())
def attend_backward(grad: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> Tensor:
    """Return the gradient of qkv, in its layout."""
    from paceline.kernels.attention_backward import backward_into

    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    gradient = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    backward_into(
        parts_of(qkv), out.transpose(1, 2), logs, grad.transpose(1, 2), parts_of(gradient)
    )
    return gradient


@attend_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _gradient(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Tensor | None:
    return None if grad is None else attend_backward(grad, *ctx.saved_tensors)


attend.register_autograd(_gradient, setup_context=_save)
