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
GRADIENT_SCALE = (
    2.0**15
)  # probabilities minus targets are in [-1, 1], and the largest e5m2 is 57344
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
def _logit_gradients(
    logits, targets, logs, straight, transposed, rows, columns, scale, tile: tl.constexpr
):  # fmt: skip
    """Write one tile of the gradient of a cross entropy in both orders: probabilities minus targets, times the scale."""
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    valid = (row < rows)[:, None] & (column < columns)[None, :]
    here = tl.cast(row, tl.int64)[:, None] * columns + column[None, :]
    there = tl.cast(column, tl.int64)[:, None] * rows + row[None, :]
    log = tl.load(logs + row, mask=row < rows, other=0.0)
    target = tl.load(targets + row, mask=row < rows, other=-1)
    values = tl.exp(tl.load(logits + here, mask=valid, other=0.0).to(tl.float32) - log[:, None])
    values -= tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    values = (values * scale).to(straight.dtype.element_ty)
    tl.store(straight + here, values, mask=valid)
    tl.store(transposed + there, tl.trans(values), mask=tl.trans(valid))


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


def logit_gradients(logits: Tensor, targets: Tensor, logs: Tensor) -> Scaled:
    """Return the gradient of the sum of cross entropies in e5m2, which holds all values from -1 to 1 times 2 ** 15."""
    rows, columns = logits.shape
    straight = torch.empty(rows, columns, dtype=torch.float8_e5m2, device=logits.device)
    other = torch.empty(columns, rows, dtype=torch.float8_e5m2, device=logits.device)
    _logit_gradients[triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE)](
        logits, targets, logs, straight, other, rows, columns, GRADIENT_SCALE, _TILE,
        num_warps=_WARPS,
    )  # fmt: skip
    return Scaled(straight, torch.full((), 1 / GRADIENT_SCALE, device=logits.device), other)
