"""Losses that are still being copied from the GPU: read on demand, or after a limited number of steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.errors import TrainingError
from paceline.scale.tree import children

MAX_PENDING_LOSSES = 64
"""Steps whose losses may be pending. After that many the GPU has long finished the first of them."""

NotFinite = Callable[[float, int], TrainingError]
"""not_finite(value, lane) -> the error to raise."""


class AsyncLoss:
    """The sum of a step's loss over its samples, known once the copy to the host has arrived."""

    def __init__(
        self, copy: Tensor, counts: list[float], arrived: torch.cuda.Event, not_finite: NotFinite
    ) -> None:
        self._copy, self._counts = copy, counts
        self._arrived, self._not_finite = arrived, not_finite
        self._value: float | None = None

    def __float__(self) -> float:
        """Wait for the copy at the first call; raise if a loss is not finite."""
        if self._value is None:
            self._arrived.synchronize()
            values = self._copy.tolist()
            for number, value in enumerate(values):
                if not math.isfinite(value):
                    raise self._not_finite(value, number)
            pairs = zip(values, self._counts, strict=True)
            self._value = tree_total([value * count for value, count in pairs])
        return self._value


class AsyncLosses:
    """Pinned host memory for the losses of the last steps."""

    def __init__(self, lanes: int) -> None:
        self._buffer = torch.zeros(MAX_PENDING_LOSSES, lanes, pin_memory=True)
        self._pending: deque[AsyncLoss] = deque()
        self._next = 0

    def copy(self, losses: Tensor, counts: list[float], not_finite: NotFinite) -> AsyncLoss:
        """Start to copy the losses of all lanes of a step."""
        if len(self._pending) == MAX_PENDING_LOSSES:
            float(self._pending.popleft())
        row = self._buffer[self._next]
        self._next = (self._next + 1) % MAX_PENDING_LOSSES
        row.copy_(losses, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._pending.append(AsyncLoss(row, counts, arrived, not_finite))
        return self._pending[-1]


def tree_total(values: list[float]) -> float:
    """Add the numbers of all lanes along the fixed tree.

    >>> tree_total([0.1, 0.2, 0.3]) == (0.1 + 0.2) + 0.3
    True
    """

    def total(node: range) -> float:
        if len(node) == 1:
            return values[node.start]
        left, right = children(node)
        return total(left) + total(right)

    return total(range(len(values)))
