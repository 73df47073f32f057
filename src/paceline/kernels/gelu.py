"""GELU (tanh approximation): two Triton kernels in bf16 on a GPU, torch's elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_HAS_TRITON = find_spec("triton") is not None


def gelu(values: Tensor) -> Tensor:
    """Return GELU of a tensor, by its tanh approximation.

    >>> gelu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8412])
    """
    if _HAS_TRITON and values.is_cuda and values.dtype == torch.bfloat16:
        result: Tensor = fast_gelu(values)
        return result
    return functional.gelu(values, approximate="tanh")


# An operator that torch.compile keeps in its graph.


@torch.library.custom_op("paceline::gelu", mutates_args=())
def fast_gelu(inputs: Tensor) -> Tensor:
    """Return GELU by the GPU's tanh instruction."""
    from paceline.kernels.gelu_kernel import forward

    return forward(inputs)


@torch.library.custom_op("paceline::gelu_backward", mutates_args=())
def fast_gelu_backward(inputs: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the input."""
    from paceline.kernels.gelu_kernel import backward

    return backward(inputs, grad)


@fast_gelu.register_fake
def _(inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


@fast_gelu_backward.register_fake
def _(inputs: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    (inputs,) = ctx.saved_tensors
    gradient: Tensor = fast_gelu_backward(inputs, grad)
    return gradient


fast_gelu.register_autograd(_gradient, setup_context=_save)
