"""The losses of a GPT on a GPU, by kernels that torch.compile must not trace."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fused_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of logits, which are read twice, and their gradient written once.

    With 50,000 tokens, memory traffic is the cost.
    """
    from paceline.kernels.loss_kernel import mean_loss

    return mean_loss(logits, target)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fp8_head_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of an output layer in fp8."""
    from paceline.kernels.fp8_head import head_loss

    return head_loss(hidden.flatten(0, 1), weight, target)
