"""Number formats of a step (autocast, bf16 weights), and the gradient scale of fp16."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.train.model.bf16_weights import Bf16Weights

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000  # steps without an overflow
_SMALLEST_SCALE = 2.0**-24
_NO_CONTEXT = contextlib.nullcontext()


class Precision:
    """Applies `config.precision` to forward, and to the gradients after backward."""

    def __init__(self, config: RunConfig, device: str, *, gathers_bf16: bool = False) -> None:
        self._device = torch.device(device).type
        casts = not gathers_bf16  # otherwise FSDP does it
        self._dtype = _AUTOCAST.get(config.precision) if casts else None
        self._rounds_weights = config.precision == "bf16-master" and casts
        self._scales = config.precision == "fp16"
        self.scale = _FIRST_SCALE if self._scales else 1.0
        """Factor of all gradients; a power of two, so that nothing is rounded."""
        self._finite_steps = 0

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return the context (autocast or none) for forward and loss."""
        if self._dtype is None:
            return _NO_CONTEXT
        return torch.autocast(self._device, self._dtype)

    def begin(self, model: nn.Module) -> None:
        """Round the weights if necessary, until `finish`; recomputation in backward uses the same ones."""
        if self._rounds_weights:
            Bf16Weights.of(model).begin()

    def finish(self, model: nn.Module) -> None:
        """Restore the fp32 weights."""
        if self._rounds_weights:
            Bf16Weights.of(model).finish()

    def unscale(self, gradients: list[Tensor]) -> bool:
        """Divide gradients by the scale; return false if one is inf or nan, so that the step must be skipped.

        All ranks have the same gradients, so all get the same answer.
        """
        if not self._scales:
            return True
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        finite = bool(torch.stack([value.isfinite().all() for value in gradients]).all())
        self._finite_steps = self._finite_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, _SMALLEST_SCALE)
        elif self._finite_steps == _GROW_AFTER:
            self.scale, self._finite_steps = self.scale * 2, 0
        return finite

    def state(self) -> list[float]:
        """Return scale and finite steps for a checkpoint."""
        return [self.scale, float(self._finite_steps)]

    def restore(self, state: list[float]) -> None:
        """Continue from the state in a checkpoint."""
        if self._scales and state:
            self.scale, self._finite_steps = state[0], int(state[1])
