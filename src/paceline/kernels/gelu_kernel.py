"""GELU (tanh approximation) with the tanh instruction of the GPU, as Triton kernels.

`tanh.approx.f32` is one instruction with a relative error of about 2 ** -11, less than the rounding of bf16. Backward
needs the input only. Triton's interpreter, which has no PTX, computes tanh by an exponential.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8
_ROOT = tl.constexpr(math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tanh(x, fast: tl.constexpr):
    if fast:
        result = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return result


@triton.jit
def _bend(x):
    return (x + x * x * x * _CUBIC) * _ROOT


@triton.jit
def _forward(inputs, outputs, count, block: tl.constexpr, fast: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    valid = places < count
    x = tl.load(inputs + places, mask=valid, other=0.0).to(tl.float32)
    result = 0.5 * x * (1.0 + _tanh(_bend(x), fast))
    tl.store(outputs + places, result.to(outputs.dtype.element_ty), mask=valid)


@triton.jit
def _backward(inputs, grads, outputs, count, block: tl.constexpr, fast: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    valid = places < count
    x = tl.load(inputs + places, mask=valid, other=0.0).to(tl.float32)
    grad = tl.load(grads + places, mask=valid, other=0.0).to(tl.float32)
    bent = _tanh(_bend(x), fast)
    slope = 0.5 * x * (1.0 - bent * bent) * ((x * x * (3.0 * _CUBIC) + 1.0) * _ROOT)
    result = grad * (0.5 * (1.0 + bent) + slope)
    tl.store(outputs + places, result.to(outputs.dtype.element_ty), mask=valid)


def forward(inputs: Tensor) -> Tensor:
    """Return GELU of a tensor."""
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    _forward[triton.cdiv(inputs.numel(), _BLOCK),](
        inputs.contiguous(), outputs, inputs.numel(), _BLOCK, inputs.is_cuda, num_warps=_WARPS
    )
    return outputs


def backward(inputs: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the input."""
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    _backward[triton.cdiv(inputs.numel(), _BLOCK),](
        inputs.contiguous(), grad.contiguous(), outputs, inputs.numel(), _BLOCK, inputs.is_cuda,
        num_warps=_WARPS,
    )  # fmt: skip
    return outputs
