"""Numbers of a replayed step that are still being copied from the GPU: read on demand, or after some more steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.scale.tree import children
from paceline.train.step.raw_copy import Destination

MAX_PENDING_STEPS = 64
"""Steps whose numbers may be pending. After that many the GPU has long finished the first of them."""

Check = Callable[[list[list[float]]], None]
"""check(numbers of each lane) raises if they show that the step has failed."""


class LaneNumbers:
    """The numbers of all lanes of one step, known once the copy to the host has arrived."""

    def __init__(self, copy: Tensor, arrived: torch.cuda.Event, check: Check) -> None:
        self._copy, self._arrived, self._check = copy, arrived, check
        self._rows: list[list[float]] | None = None

    def rows(self) -> list[list[float]]:
        """Return the numbers; the first call waits for the copy, and raises if the step has failed."""
        if self._rows is None:
            self._arrived.synchronize()
            self._rows = self._copy.tolist()
            self._check(self._rows)
        return self._rows

    def column(self, number: int) -> AsyncSum:
        """Return the sum of one number over all lanes."""
        return AsyncSum(self, number)


class AsyncSum:
    """A sum over the lanes of a step, such as that of the loss: `float` waits for it."""

    def __init__(self, numbers: LaneNumbers, column: int) -> None:
        self._numbers, self._column = numbers, column

    def __float__(self) -> float:
        return tree_total([row[self._column] for row in self._numbers.rows()])


class AsyncRows:
    """Pinned host memory for the numbers of the last steps."""

    def __init__(self, lanes: int, columns: int) -> None:
        memory = torch.zeros(
            MAX_PENDING_STEPS, lanes, columns, dtype=torch.float64, pin_memory=True
        )
        self._device = torch.cuda.current_device()
        slots = [(Destination(place, self._device), torch.cuda.Event()) for place in memory]  # type: ignore[no-untyped-call]
        self._slots = itertools.cycle(slots)
        self._pending: deque[LaneNumbers] = deque()
        self._stream = torch.cuda.current_stream()

    def copy(self, rows: Tensor, check: Check) -> LaneNumbers:
        """Start to copy the numbers of all lanes of a step."""
        if len(self._pending) == MAX_PENDING_STEPS:
            self._pending.popleft().rows()
        place, arrived = next(self._slots)
        stream = self._current_stream()
        place.fill(rows, stream.cuda_stream)
        arrived.record(stream)
        numbers = LaneNumbers(place.tensor, arrived, check)
        self._pending.append(numbers)
        return numbers

    def _current_stream(self) -> torch.cuda.Stream:
        """Return the stream of the copies; asking torch for its object in every step would take 3 % of a small one."""
        if torch._C._cuda_getCurrentRawStream(self._device) != self._stream.cuda_stream:  # noqa: SLF001
            self._stream = torch.cuda.current_stream()
        return self._stream


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
