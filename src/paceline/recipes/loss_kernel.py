"""The mean loss of many scores, as two kernels for a GPU: one reads the scores once, the other writes their gradient.

Triton would take types of the kernels' arguments for its own, so they have none. No sum is shared between blocks of threads, so the bits are always the same. Imported only where there is Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

_BLOCK = 2048  # scores at once; with 4 warps the fastest on an H200, at 4 TB/s
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _forward(scores, targets, losses, logs, width, block: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Write the loss of a row, and the logarithm of the sum of its exponentials."""
    row = tl.program_id(0).to(tl.int64)
    here = scores + row * width
    most = -float("inf")
    total = 0.0
    for begin in range(0, width, block):
        places = begin + tl.arange(0, block)
        values = tl.load(here + places, mask=places < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(values, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(values - higher), 0)
        most = higher
    log = most + tl.log(total)
    tl.store(logs + row, log)
    tl.store(losses + row, log - tl.load(here + tl.load(targets + row)).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _backward(scores, targets, logs, outer, gradients, width, block: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Write the gradient of some scores of a row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * block + tl.arange(0, block)
    there = places < width
    values = tl.load(scores + row * width + places, mask=there, other=0.0).to(tl.float32)
    shares = tl.exp(values - tl.load(logs + row)) - tl.where(
        places == tl.load(targets + row), 1.0, 0.0
    )
    tl.store(
        gradients + row * width + places,
        (shares * tl.load(outer)).to(gradients.dtype.element_ty),
        mask=there,
    )


class _MeanLoss(torch.autograd.Function):
    """Cross entropy, averaged over the rows."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of scores [rows, tokens]."""
        rows, width = scores.shape
        losses, logs = torch.empty(2, rows, device=scores.device).unbind(0)
        _forward[rows,](scores, targets, losses, logs, width, _BLOCK, num_warps=_WARPS)
        ctx.save_for_backward(scores, targets, logs)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the scores."""
        scores, targets, logs = ctx.saved_tensors
        (rows, width), gradients = scores.shape, torch.empty_like(scores)
        grid = rows, triton.cdiv(width, _BLOCK)
        _backward[grid](
            scores, targets, logs, outer / rows, gradients, width, _BLOCK, num_warps=_WARPS
        )
        return gradients, None


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of scores [rows, tokens] on a GPU, counted in fp32 whatever the scores are."""
    found: Tensor = _MeanLoss.apply(scores.contiguous(), targets.contiguous())  # type: ignore[no-untyped-call]
    return found
