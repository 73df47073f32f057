"""The output layer and the loss of a language model in fp8.

cuBLASLt multiplies fp8 on Hopper only where both matrices are contiguous along the dimension that is summed, in
multiples of 16; so every matrix is kept in both orders. Hidden states and weight are scaled by their largest absolute
value, which is exact and does not depend on the order of the values. The gradient of the logits has a known bound; the
kernel of the loss writes it in fp8 at once, and the factor from upstream becomes part of the scale of the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.kernels.fp8_kernel import quantized, transposed
from paceline.kernels.loss_kernel import gradients_of, losses_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SCALE = 2.0**15  # probabilities minus targets are in [-1, 1], and the largest e5m2 is 57344
_MULTIPLE = 16


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of hidden states [rows, width] and weight [vocabulary, width]."""
    sizes = {
        "tokens in a lane": hidden.shape[0],
        "embedding_dim": hidden.shape[1],
        "vocab_size": weight.shape[0],
    }
    for name, size in sizes.items():
        if size % _MULTIPLE:
            raise ConfigError(
                f"fp8_head needs multiples of {_MULTIPLE}, but {name} = {size}",
                fix=f"change {name} to {-(-size // _MULTIPLE) * _MULTIPLE}, or remove fp8_head",
            )
    with torch.autocast(hidden.device.type, enabled=False):
        return _HeadLoss.apply(hidden.bfloat16(), weight.bfloat16(), targets)  # type: ignore[no-any-return]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        left, right = quantized(hidden, E4M3), quantized(weight, E4M3)
        logits = _product(left.values, right.values, left.inverse, right.inverse, fast=True)
        losses, logs = losses_of(logits, targets)
        scale = torch.full((), _SCALE, device=logits.device)
        above = gradients_of(logits, targets, logs, scale, E5M2)
        ctx.save_for_backward(above, left.transposed, left.inverse, right.transposed, right.inverse)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        above, hidden, hidden_scale, weight, weight_scale = ctx.saved_tensors
        scale = outer.float() / (len(above) * _SCALE)
        grad_hidden = _product(above, weight, scale, weight_scale, fast=False)
        grad_weight = _product(transposed(above), hidden, scale, hidden_scale, fast=False)
        return grad_hidden, grad_weight, None


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, *, fast: bool
) -> Tensor:
    """Return left [m, k] @ right [n, k].T * left_scale * right_scale in bf16.

    `fast` accumulates in fewer bits, as is usual for the forward pass.
    """
    result: Tensor = torch._scaled_mm(  # noqa: SLF001 - torch has no public function for it yet
        left,
        right.t(),
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return result
