"""In which numbers a step computes; and for fp16, by how much gradients are made larger so that none is lost."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.train.bf16_weights import Bf16Weights

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000  # steps without an overflow
_SMALLEST_SCALE = 2.0**-24


def casts_weights(config: RunConfig, ranks: int) -> bool:
    """Return whether FSDP sends weights as bf16 and forward computes in it throughout, instead of autocast op by op.

    That is half the bytes, and what bf16-master means. For bf16 it is other numbers than those of a rank alone: there it
    is left to exact=false.
    """
    if config.parallel != "fsdp" or ranks == 1:
        return False
    return config.precision == "bf16-master" or (config.precision == "bf16" and not config.exact)


class Precision:
    """What `config.precision` means for forward, and for the gradients after backward."""

    def __init__(self, config: RunConfig, device: str, ranks: int = 1) -> None:
        self._device = torch.device(device).type
        self._dtype = None if casts_weights(config, ranks) else _AUTOCAST.get(config.precision)
        self._shortens = config.precision == "bf16-master" and not casts_weights(config, ranks)
        self._scales = config.precision == "fp16"
        self.scale = _FIRST_SCALE if self._scales else 1.0
        """What gradients are multiplied with; a power of two, so that nothing is rounded."""
        self._good = 0

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return what forward and loss run in."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device, self._dtype)

    def begin(self, model: nn.Module) -> None:
        """Let a model compute with the weights that forward is to have, until `finish`; backward may compute again."""
        if self._shortens:
            Bf16Weights.of(model).begin()

    def finish(self, model: nn.Module) -> None:
        """Let a model have its own weights again."""
        if self._shortens:
            Bf16Weights.of(model).finish()

    def unscale(self, gradients: list[Tensor]) -> bool:
        """Bring gradients back to their size; return whether the step counts: not if one is infinite or no number.

        All ranks have the same gradients, so all come to the same answer.
        """
        if not self._scales:
            return True
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        finite = bool(torch.stack([value.isfinite().all() for value in gradients]).all())
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, _SMALLEST_SCALE)
        elif self._good == _GROW_AFTER:
            self.scale, self._good = self.scale * 2, 0
        return finite

    def state(self) -> list[float]:
        """Return what a checkpoint must hold."""
        return [self.scale, float(self._good)]

    def restore(self, state: list[float]) -> None:
        """Go on from such a state."""
        if self._scales and state:
            self.scale, self._good = state[0], int(state[1])
