"""Losses that are still on their way from the device: they are read when somebody asks, or after so many steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.errors import TrainingError
from paceline.scale.tree import children

_KEPT = 64
"""Steps whose losses may be on their way: by then the device has long been done with the first of them."""

NotFinite = Callable[[float, int], TrainingError]


class AsyncLoss:
    """The sum of a step's loss over what was counted, known once its copy has arrived."""

    def __init__(
        self, copy: Tensor, counts: list[float], arrived: torch.cuda.Event, not_finite: NotFinite
    ) -> None:
        self._copy, self._counts, self._arrived, self._not_finite = (
            copy,
            counts,
            arrived,
            not_finite,
        )
        self._value: float | None = None

    def __float__(self) -> float:
        """Wait for the loss, the first time; whoever asks learns that it was not finite."""
        if self._value is None:
            self._arrived.synchronize()
            values = self._copy.tolist()
            for number, value in enumerate(values):
                if not math.isfinite(value):
                    raise self._not_finite(value, number)
            self._value = tree_total(
                [value * count for value, count in zip(values, self._counts, strict=True)]
            )
        return self._value


class AsyncLosses:
    """Memory of the host into which the losses of the last steps are copied."""

    def __init__(self, lanes: int) -> None:
        self._memory = torch.zeros(_KEPT, lanes, pin_memory=True)
        self._under_way: deque[AsyncLoss] = deque()
        self._next = 0

    def copy(self, losses: Tensor, counts: list[float], not_finite: NotFinite) -> AsyncLoss:
        """Begin to copy the losses of all lanes of a step."""
        if len(self._under_way) == _KEPT:
            float(self._under_way.popleft())
        place = self._memory[self._next]
        self._next = (self._next + 1) % _KEPT
        place.copy_(losses, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._under_way.append(AsyncLoss(place, counts, arrived, not_finite))
        return self._under_way[-1]


def tree_total(values: list[float]) -> float:
    """Add numbers of lanes along the fixed tree.

    >>> tree_total([0.1, 0.2, 0.3]) == (0.1 + 0.2) + 0.3
    True
    """

    def total(node: range) -> float:
        if len(node) == 1:
            return values[node.start]
        left, right = children(node)
        return total(left) + total(right)

    return total(range(len(values)))
