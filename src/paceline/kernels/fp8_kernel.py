"""Matrices in fp8, each with a transposed copy, by Triton kernels.

A scale is a power of two, so that scaling rounds nothing. It comes from a maximum, which is exact and does not depend
on the order of the values, or from a bound that is known beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_EXPONENTS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # 2 ** exponent <= largest value
_TILE, _WARPS = 128, 8


class Scaled(NamedTuple):
    """An fp8 matrix; its values times `inverse`, an fp32 scalar on the device, are the original's."""

    values: Tensor
    inverse: Tensor
    transposed: Tensor
    """The values with rows and columns exchanged, contiguous."""


@triton.jit
def _quantize(
    source, scale, straight, transposed, rows, columns,
    limit: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Convert one tile; write it in the order of the source, and transposed."""
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    valid = (row < rows)[:, None] & (column < columns)[None, :]
    here = tl.cast(row, tl.int64)[:, None] * columns + column[None, :]
    values = tl.load(source + here, mask=valid, other=0.0).to(tl.float32) * tl.load(scale)
    values = tl.minimum(tl.maximum(values, -limit), limit).to(straight.dtype.element_ty)
    tl.store(straight + here, values, mask=valid)
    there = tl.cast(column, tl.int64)[:, None] * rows + row[None, :]
    tl.store(transposed + there, tl.trans(values), mask=tl.trans(valid))


@triton.jit
def _transpose(source, target, rows, columns, tile: tl.constexpr):
    """Write one tile of bytes with rows and columns exchanged."""
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    valid = (row < rows)[:, None] & (column < columns)[None, :]
    here = tl.cast(row, tl.int64)[:, None] * columns + column[None, :]
    there = tl.cast(column, tl.int64)[:, None] * rows + row[None, :]
    values = tl.load(source + here, mask=valid, other=0)
    tl.store(target + there, tl.trans(values), mask=tl.trans(valid))


def scale_for(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest power of two that keeps values up to the bound below the largest of fp8.

    >>> scale_for(torch.tensor(3.0), torch.float8_e4m3fn)  # 3 * 64 = 192
    tensor(64.)
    """
    _, exponent = torch.frexp(bound.float())  # bound < 2 ** exponent
    # The bits of a power of two: a GPU's pow need not be exact.
    bits = (_EXPONENTS[dtype] + 127 - exponent).clamp(1, 254) << 23
    return bits.to(torch.int32).view(torch.float32)


def quantized(matrix: Tensor, dtype: torch.dtype) -> Scaled:
    """Convert a matrix, scaled by its largest absolute value, and its transpose."""
    rows, columns = matrix.shape
    matrix = matrix.contiguous()
    scale = scale_for(torch.linalg.vector_norm(matrix, torch.inf), dtype)
    straight = torch.empty(rows, columns, dtype=dtype, device=matrix.device)
    other = torch.empty(columns, rows, dtype=dtype, device=matrix.device)
    _quantize[triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE)](
        matrix, scale, straight, other, rows, columns, LARGEST[dtype], _TILE, num_warps=_WARPS
    )
    return Scaled(straight, scale.reciprocal(), other)


def transposed(matrix: Tensor) -> Tensor:
    """Return a contiguous transpose of an fp8 matrix."""
    rows, columns = matrix.shape
    target = torch.empty(columns, rows, dtype=matrix.dtype, device=matrix.device)
    _transpose[triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE)](
        matrix.view(torch.uint8), target.view(torch.uint8), rows, columns, _TILE, num_warps=_WARPS
    )
    return target
