"""The output layer in fp8: logits, and the gradients of hidden states and weight.

cuBLASLt multiplies fp8 on Hopper only where both matrices are contiguous along the dimension that is summed, in
multiples of 16. So the weight and the hidden states are kept in both orders, which is cheap; the gradient of the logits
is needed in both orders too, if the gradient of the weight is to be computed in fp8.

- `head` returns bf16 logits, for any loss. Its backward gets bf16 gradients, and converts them.
- `head_loss` includes the loss: its kernel writes the gradients of the logits in fp8 at once, and the upstream factor
  becomes part of the scale of the products.
"""

from __future__ import annotations

from typing import Any

import torch
from parts.fp8_tensors import Scaled, largest_of, quantized, transposed
from parts.one_pass_loss import TODAY, Choice, loss_and_gradient
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_GRADIENT_SCALE = (
    2.0**15
)  # probabilities minus targets are in [-1, 1], and the largest e5m2 is 57344


def product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, *, fast: bool
) -> Tensor:
    """Return left [m, k] @ right [n, k].T * left_scale * right_scale in bf16.

    `fast` accumulates in fewer bits, as is usual for the forward pass.
    """
    result: Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return result


def _inputs(hidden: Tensor, weight: Tensor, *, fp8_weight_gradient: bool) -> tuple[Scaled, Scaled]:
    """Return hidden states and weight in fp8, both with the transpose that backward needs."""
    return (
        quantized(hidden, E4M3, largest_of(hidden), both=fp8_weight_gradient),
        quantized(weight, E4M3, largest_of(weight), both=True),
    )


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bound: float | None, weight_gradient: str
    ) -> Tensor:
        in_fp8 = weight_gradient == "fp8"
        left, right = _inputs(hidden, weight, fp8_weight_gradient=in_fp8)
        ctx.save_for_backward(
            left.transposed if in_fp8 else hidden, left.inverse, right.transposed, right.inverse
        )
        ctx.bound, ctx.in_fp8 = bound, in_fp8
        return product(left.values, right.values, left.inverse, right.inverse, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, hidden_scale, weight, weight_scale = ctx.saved_tensors
        if ctx.bound is None:
            bound = largest_of(grad)
        else:
            bound = torch.full((), ctx.bound, device=grad.device)
        above = quantized(grad, E5M2, bound, both=ctx.in_fp8)
        grad_hidden = product(above.values, weight, above.inverse, weight_scale, fast=False)
        if above.transposed is None:
            return grad_hidden, grad.t() @ hidden, None, None
        grad_weight = product(above.transposed, hidden, above.inverse, hidden_scale, fast=False)
        return grad_hidden, grad_weight, None, None


def head(
    hidden: Tensor,
    weight: Tensor,
    *,
    bound: float | None = None,
    weight_gradient: str = "fp8",
) -> Tensor:
    """Return bf16 logits [rows, vocabulary] of bf16 hidden states [rows, width] and weight [vocabulary, width].

    bound: the largest absolute value that a gradient of the logits can have, which for a mean over n rows is the
    upstream factor / n; larger ones are clipped. None: the maximum of every backward pass, which reads all of them once
    more. weight_gradient: computed in fp8 or bf16.
    """
    logits: Tensor = _Head.apply(hidden, weight, bound, weight_gradient)
    return logits


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, choice: Choice
    ) -> Tensor:
        left, right = _inputs(hidden, weight, fp8_weight_gradient=True)
        logits = product(left.values, right.values, left.inverse, right.inverse, fast=True)
        gradients = torch.empty_like(logits, dtype=E5M2)
        losses = loss_and_gradient(logits, targets, gradients, _GRADIENT_SCALE, choice)
        ctx.save_for_backward(
            gradients, left.transposed, left.inverse, right.transposed, right.inverse
        )
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        above, hidden, hidden_scale, weight, weight_scale = ctx.saved_tensors
        scale = outer.float() / (above.shape[0] * _GRADIENT_SCALE)
        grad_hidden = product(above, weight, scale, weight_scale, fast=False)
        grad_weight = product(transposed(above), hidden, scale, hidden_scale, fast=False)
        return grad_hidden, grad_weight, None, None


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, choice: Choice = TODAY) -> Tensor:
    """Return the mean cross entropy of bf16 hidden states [rows, width] and weight [vocabulary, width]."""
    loss: Tensor = _HeadLoss.apply(hidden, weight, targets, choice)
    return loss
