"""Correct what Triton's interpreter (3.6 to 3.9) computes wrongly: products of bf16, and rounding to fp8.

The interpreter keeps bf16 as whole numbers and multiplies those; and a value that rounds up to the next power of two
gets a wrong exponent in fp8. On a GPU both are right. Rounding to bf16, which the interpreter does by cutting off bits,
stays as it is: errors are up to twice those of a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter

_FP8 = {tl.float8e5: torch.float8_e5m2, tl.float8e4nv: torch.float8_e4m3fn}


def _as_fp32(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
    return interpreter.TensorHandle(data, tl.float32)


def correct() -> None:
    """Replace the two functions of the interpreter."""
    builder: Any = interpreter.InterpreterBuilder
    product, convert = builder.create_dot, builder.create_fp_to_fp

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return product(self, _as_fp32(left), _as_fp32(right), *others)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar not in _FP8 or source.dtype.scalar != tl.float32:
            return convert(self, source, target, rounding)
        values = torch.from_numpy(numpy.ascontiguousarray(source.data)).to(_FP8[target.scalar])
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), target.scalar)

    builder.create_dot, builder.create_fp_to_fp = create_dot, create_fp_to_fp
