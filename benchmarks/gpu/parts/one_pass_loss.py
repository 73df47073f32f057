"""Can one kernel compute the loss and the gradient of the logits?

Each program takes a row at a time: it sums the exponentials, then reads the row again, from the L2 cache if few rows are
in flight, and writes the gradient. The forward pass thus does all the work. The backward pass returns the gradient that
is there already, unless the upstream factor is not the expected one: then a kernel multiplies the gradient in place.

With `TODAY` as the choice the arithmetic of every row is that of `paceline.recipes.loss_kernel` in the same order, so
the gradients have the same bits if the upstream factor is the expected one. Otherwise they are rounded a second time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Choice(NamedTuple):
    """How a kernel is cut."""

    block: int
    warps: int
    stages: int
    """Loads in flight per program."""
    rows_per_sm: int
    """Rows in flight per multiprocessor; 0: one program per row, as many at once as fit."""


TODAY = Choice(2048, 4, 3, 0)
"""Block and warps of today's kernel: other sizes add in another order."""
CHOICES = {
    "2048, 4 warps, all rows": TODAY,
    "2048, 4 warps, 2 rows per SM": Choice(2048, 4, 6, 2),
    "2048, 4 warps, 3 rows per SM": Choice(2048, 4, 6, 3),
    "2048, 4 warps, 4 rows per SM": Choice(2048, 4, 4, 4),
    "8192, 16 warps, 2 rows per SM": Choice(8192, 16, 2, 2),
    "16384, 32 warps, 1 row per SM": Choice(16384, 32, 3, 1),
    "4096, 8 warps, 2 rows per SM": Choice(4096, 8, 4, 2),
}
_SCALE_BLOCK = 4096
_SCALE_PROGRAMS = 1056  # 8 per multiprocessor of an H200: few, because mostly they return at once


@triton.jit
def row_log_sum(start, width, block: tl.constexpr, stages: tl.constexpr):
    """Return the log-sum-exp of a row."""
    largest = -float("inf")
    total = 0.0
    for begin in tl.range(0, width, block, num_stages=stages):
        columns = begin + tl.arange(0, block)
        values = tl.load(
            start + columns,
            mask=columns < width,
            other=-float("inf"),
            eviction_policy="evict_last",
        ).to(tl.float32)
        higher = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(values - higher), 0)
        largest = higher
    return largest + tl.log(total)


@triton.jit
def _loss_and_gradient(
    logits, targets, losses, gradients, rows, width, factor,
    block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Write loss and gradient of every row of this program; `gradients` may be `logits`."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * width
        target = tl.load(targets + row)
        log = row_log_sum(logits + offset, width, block, stages)
        tl.store(losses + row, log - tl.load(logits + offset + target).to(tl.float32))
        # The loss above reads the logit of the target before the loop below may overwrite it.
        tl.debug_barrier()
        for begin in tl.range(0, width, block, num_stages=stages):
            columns = begin + tl.arange(0, block)
            valid = columns < width
            values = tl.load(
                logits + offset + columns, mask=valid, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            gradient = tl.exp(values - log) - tl.where(columns == target, 1.0, 0.0)
            tl.store(
                gradients + offset + columns,
                (gradient * factor).to(gradients.dtype.element_ty),
                mask=valid,
                eviction_policy="evict_first",
            )


@triton.jit
def _multiply_unless_expected(gradients, outer, expected, rows, width, block: tl.constexpr):
    """Multiply the gradients by the upstream factor over the expected one, or return at once."""
    found = tl.load(outer).to(tl.float32)
    if found != expected:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            start = gradients + tl.cast(row, tl.int64) * width
            for begin in range(0, width, block):
                columns = begin + tl.arange(0, block)
                valid = columns < width
                values = tl.load(start + columns, mask=valid, other=0.0).to(tl.float32)
                changed = values * (found / expected)
                tl.store(start + columns, changed.to(gradients.dtype.element_ty), mask=valid)


def programs_of(choice: Choice, rows: int, device: torch.device) -> int:
    """Return how many programs share the rows."""
    if choice.rows_per_sm == 0 or device.type != "cuda":
        return rows
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, count * choice.rows_per_sm)


def loss_and_gradient(
    logits: Tensor, targets: Tensor, gradients: Tensor, factor: float, choice: Choice
) -> Tensor:
    """Return the loss of every row, and write its gradient times the factor."""
    rows, width = logits.shape
    losses = torch.empty(rows, device=logits.device)
    _loss_and_gradient[programs_of(choice, rows, logits.device),](
        logits, targets, losses, gradients, rows, width, factor,
        choice.block, choice.stages, num_warps=choice.warps,
    )  # fmt: skip
    return losses


class _MeanLoss(torch.autograd.Function):
    """Cross entropy, averaged over rows, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        choice: Choice,
        expected: float,
        over_logits: bool,  # noqa: FBT001 - Function.apply takes no keywords
    ) -> Tensor:
        gradients = logits.detach() if over_logits else torch.empty_like(logits)
        losses = loss_and_gradient(logits, targets, gradients, expected / logits.shape[0], choice)
        ctx.gradients, ctx.expected = gradients, expected
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradient of this loss was already taken"
        rows, width = gradients.shape
        _multiply_unless_expected[min(rows, _SCALE_PROGRAMS),](
            gradients, outer, ctx.expected, rows, width, _SCALE_BLOCK, num_warps=8
        )
        return gradients, None, None, None, None


def mean_loss(
    logits: Tensor,
    targets: Tensor,
    choice: Choice = TODAY,
    *,
    expected: float = 1.0,
    over_logits: bool = False,
) -> Tensor:
    """Return the mean cross entropy of logits [rows, vocabulary], computed in fp32.

    `expected` is the upstream factor for which backward has nothing to do: 1 over the number of micro-batches, for
    example. With `over_logits` the gradient overwrites the logits, which nobody may read afterwards.
    """
    loss: Tensor = _MeanLoss.apply(
        logits.contiguous(), targets.contiguous(), choice, expected, over_logits
    )
    return loss
