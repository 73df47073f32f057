"""Causal attention of a qkv tensor as an operator that torch.compile keeps in its graph.

Forward: cuDNN, FlashAttention, the Triton kernel, or the formula in fp32. Backward: the two Triton kernels, which write
into one buffer of the layout of qkv, so that no copy follows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from parts import attention_backward, attention_forward
from torch import Tensor

FORWARDS = ("cudnn", "flash", "triton", "formula")


def parts_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [batch, heads, length, head dim] of qkv [batch, length, 3, heads, head dim]."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def formula(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of causal attention, computed in the dtype of the inputs."""
    length, head_dim = query.shape[-2:]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-1, -2) / math.sqrt(head_dim)).masked_fill(hidden, -math.inf)
    logs = scores.logsumexp(-1)
    return (scores - logs[..., None]).exp() @ value, logs


def run_forward(name: str, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the kernel of this name."""
    if name == "triton":
        return attention_forward.forward(*inputs)
    if name == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, is_causal=True)
        return found[0], found[1]
    if name == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *inputs,
            None,
            True,  # noqa: FBT003 - return the log-sum-exp; the operator takes it by place
            0.0,
            is_causal=True,
        )
        return found[0], found[1]
    query, key, value = (tensor.float() for tensor in inputs)
    out, logs = formula(query, key, value)
    return out.to(inputs[0].dtype), logs


@torch.library.custom_op("paceline_parts::causal_attention", mutates_args=())
def causal_attention(qkv: Tensor, forward: str) -> tuple[Tensor, Tensor]:
    """Return output [batch, length, heads, head dim] and log-sum-exp [batch, heads, length]."""
    batch, length, _, heads, _ = qkv.shape
    out, logs = run_forward(forward, parts_of(qkv))
    return out.transpose(1, 2).contiguous(), logs.reshape(batch, heads, length).contiguous()


@causal_attention.register_fake
def _(qkv: Tensor, forward: str) -> tuple[Tensor, Tensor]:
    batch, length, _, heads, head_dim = qkv.shape
    logs = qkv.new_empty(batch, heads, length, dtype=torch.float32)
    return qkv.new_empty(batch, length, heads, head_dim), logs


@torch.library.custom_op("paceline_parts::causal_attention_backward", mutates_args=())
def causal_attention_backward(grad: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> Tensor:
    """Return the gradient of qkv, in its layout."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    gradient = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    attention_backward.backward_into(
        parts_of(qkv), out.transpose(1, 2), logs, grad.transpose(1, 2), parts_of(gradient)
    )
    return gradient


@causal_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], *output)


def _gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
    if grad is None:
        return None, None
    return causal_attention_backward(grad, *ctx.saved_tensors), None


causal_attention.register_autograd(_gradients, setup_context=_save)


def attend(qkv: Tensor, forward: str = "cudnn") -> Tensor:
    """Return causal attention [batch, length, heads, head dim] of qkv [batch, length, 3, heads, head dim]."""
    out: Tensor = causal_attention(qkv, forward)[0]
    return out
