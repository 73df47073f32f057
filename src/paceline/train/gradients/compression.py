"""An all-reduce of a bucket in the backend's order, with as few bytes as `compression` says."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.world.collectives import finish

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class AllReduceExchange:
    """Adds a bucket over all ranks, rounded to fewer bits if asked."""

    def __init__(self, wire: torch.device, compression: str) -> None:
        self._wire, self._dtype = wire, _DTYPES.get(compression)

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send this rank's sum."""
        assert not notes
        self._sent = sums[0].to(self._wire, self._dtype or sums[0].dtype)
        self._work = dist.all_reduce(self._sent, async_op=True)

    def advance(self, total: Tensor) -> bool:
        """Wait for the sum."""
        finish(self._work)
        total.copy_(self._sent)
        return True


class PowerSgdExchange:
    """Adds a bucket as products of low-rank matrices, by torch's own PowerSGD."""

    def __init__(self, parameters: list[Tensor], ranks: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._hook = powerSGD_hook.powerSGD_hook
        self._state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
        self._parameters, self._ranks = parameters, ranks

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send this rank's sum. The hook returns a mean over ranks."""
        assert not notes
        bucket: Any = _WholeBucket(sums[0], self._parameters)
        self._done = self._hook(self._state, bucket)

    def advance(self, total: Tensor) -> bool:
        """Wait for the sum."""
        torch.mul(self._done.wait(), self._ranks, out=total)
        return True


class _WholeBucket:
    """All gradients as one bucket, with the interface of DDP's GradBucket."""

    def __init__(self, flat: Tensor, parameters: list[Tensor]) -> None:
        self._flat, self._parameters = flat, parameters

    def index(self) -> int:
        """Return the bucket's number."""
        return 0

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return True

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        """Replace the flat tensor."""
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, without gaps: channels-last weights have columns in another order."""
        sizes = [value.numel() for value in self._parameters]
        pairs = zip(torch.split(self._flat, sizes), self._parameters, strict=True)
        return [piece.view(value.shape) for piece, value in pairs]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of their gradients."""
        return self._parameters
