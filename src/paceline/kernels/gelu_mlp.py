"""The MLP of a transformer, with GELU (tanh approximation) inside of its matrix products in bf16 on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from paceline.kernels.lt_products import gelu_gradient_of_product, gelu_of_product, library

_HAS_LIBRARY = library() is not None
_SIZES = 8
"""Every size must be a multiple of this: 16 bytes of bf16."""


def gelu_mlp(hidden: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Return `down(gelu(up(hidden)))`; in bf16 on a GPU without a pass over memory for GELU.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator ...>
    >>> up, down, hidden = nn.Linear(4, 16), nn.Linear(16, 4), torch.randn(3, 4)
    >>> torch.equal(gelu_mlp(hidden, up, down), down(gelu(up(hidden), approximate="tanh")))
    True
    """
    if not _has_products(hidden, up, down):
        plain: Tensor = down(gelu(up(hidden), approximate="tanh"))
        return plain
    values = [hidden.flatten(0, -2), up.weight, down.weight]
    inputs, wide, narrow = (value.to(torch.bfloat16).contiguous() for value in values)
    bias = None if up.bias is None else up.bias.to(torch.bfloat16)
    result: Tensor = fused_mlp(inputs, wide, bias, narrow)[0].view(hidden.shape)
    return result if down.bias is None else result + down.bias.to(torch.bfloat16)


def _has_products(hidden: Tensor, up: nn.Linear, down: nn.Linear) -> bool:
    """Return whether the products are computed in bf16 on a GPU, with sizes that cuBLASLt's GELU takes."""
    is_plain = type(up) is nn.Linear and type(down) is nn.Linear
    if not (_HAS_LIBRARY and hidden.is_cuda and is_plain):
        return False
    is_autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if is_autocast else hidden.dtype
    is_bf16 = dtype == torch.bfloat16 and (is_autocast or up.weight.dtype == dtype)
    sizes = hidden.numel() // hidden.shape[-1], *up.weight.shape
    return is_bf16 and not any(size % _SIZES for size in sizes)


# Operators that torch.compile keeps in its graph.


@torch.library.custom_op("paceline::gelu_mlp", mutates_args=())
def fused_mlp(
    inputs: Tensor, wide: Tensor, bias: Tensor | None, narrow: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and what backward needs: the inner values after GELU and before it."""
    found = gelu_of_product(inputs, wide, bias)
    if found is None:
        before = linear(inputs, wide, bias)
        found = gelu(before, approximate="tanh"), before
    inner, before = found
    return linear(inner, narrow), inner, before


@fused_mlp.register_fake
def _(
    inputs: Tensor, wide: Tensor, bias: Tensor | None, narrow: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    inner = inputs.new_empty(len(inputs), len(wide))
    return inputs.new_empty(len(inputs), len(narrow)), inner, torch.empty_like(inner)


@torch.library.custom_op("paceline::gelu_mlp_backward", mutates_args=())
def inner_gradient(grad: Tensor, narrow: Tensor, before: Tensor) -> Tensor:
    """Return the gradient of the inner values before GELU."""
    found = gelu_gradient_of_product(grad.contiguous(), narrow, before)
    if found is None:
        found = torch.ops.aten.gelu_backward(grad @ narrow, before, approximate="tanh")
    return found


@inner_gradient.register_fake
def _(grad: Tensor, narrow: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    values, wide, bias, narrow = inputs
    _, inner, before = output
    ctx.set_materialize_grads(False)
    ctx.has_bias = bias is not None
    ctx.save_for_backward(values, wide, narrow, inner, before)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    values, wide, narrow, inner, before = ctx.saved_tensors
    inside: Tensor = inner_gradient(grad, narrow, before)
    of_bias = inside.sum(0) if ctx.has_bias else None
    return inside @ wide, inside.T @ values, of_bias, grad.T @ inner


fused_mlp.register_autograd(_gradients, setup_context=_save)
