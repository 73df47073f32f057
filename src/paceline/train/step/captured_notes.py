"""The notes of a captured update: rows on the GPU, with the numbers that an eager update sends from the host."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.data.reading.batches import Lane
from paceline.train.gradients.note import NOTE_HEAD, Note
from paceline.train.step.async_sums import AsyncRows, AsyncSum, tree_total
from paceline.train.step.captured_outcome import CannotCapture
from paceline.train.step.lane_loss import (
    Losses,
    means,
    named_values,
    not_finite,
    refuse_no_count,
)

_LATE = "some steps later, because the step was replayed as a CUDA graph"
_REQUESTS = slice(2, NOTE_HEAD)
_FIRST_OTHER = NOTE_HEAD + 1  # after the number that tells of missing gradients


class NoteLayout(NamedTuple):
    """What the columns of a note hold: the head, sums and counts of other values, a flag, changes of buffers."""

    names: tuple[str, ...]
    counted: tuple[bool, ...]
    """Whether each value came as (sum, count)."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> NoteLayout:
        """Return the layout for the values of a loss."""
        return cls(tuple(values), tuple(isinstance(value, tuple) for value in values.values()))

    @property
    def by_count(self) -> bool:
        """Whether gradients must be divided by the count of all lanes."""
        return self.counted[0]

    @property
    def flag(self) -> int:
        """The column that says whether a buffer has changed for the first time; changes of buffers follow it."""
        return _FIRST_OTHER + 2 * (len(self.names) - 1)

    def sum_at(self, number: int) -> int:
        """Return the column with the sum of a value."""
        return _FIRST_OTHER + number - 1 if number else 0

    def count_at(self, number: int) -> int:
        """Return the column with the count of a value."""
        return _FIRST_OTHER + len(self.names) - 2 + number if number else 1


class StepLanes(NamedTuple):
    """Which lanes of which step a rank has run: what an error needs, without the batch."""

    step: int
    samples: int
    """Samples of all ranks."""
    lanes: tuple[int, ...]
    rank: int

    def refuse_not_finite(self, rows: list[list[float]], *, late: bool) -> None:
        """Raise if the loss of a lane is inf or nan."""
        for lane, row in zip(self.lanes, rows, strict=True):
            if not math.isfinite(row[0]):
                when = _LATE if late else "before the update"
                raise not_finite(row[0], self.step, f"lane {lane} (rank {self.rank})", when)


class CapturedNotes:
    """One row per lane of this rank. All tensors stay where they are from one replay to the next."""

    def __init__(self, layout: NoteLayout, lanes: int, length: int, device: torch.device) -> None:
        self.layout = layout
        self.rows = torch.zeros(lanes, length, dtype=torch.float64, device=device)
        self._factors: dict[float, Tensor] = {}
        self._counts: dict[tuple[int, int], float] = {}
        """The counts that the loss gave as Python numbers, by row and column: the same in every replay."""
        self._later = AsyncRows(lanes, layout.flag)
        self._has_requests = False

    def take(self, result: Any, row: int, lane: Lane) -> Tensor:
        """Write what the loss of a lane returned into its row; return the tensor from which backward starts."""
        output, values = named_values(result)
        if NoteLayout.of(values) != self.layout:
            raise CannotCapture(f"the loss returns other values for lane {lane.number}")
        has_samples = float(lane.samples > 0)
        for number, (name, value) in enumerate(values.items()):
            is_counted = isinstance(value, tuple)
            total, count = value if is_counted else (value, lane.samples)
            if not isinstance(total, Tensor):
                raise CannotCapture(f"the value {name!r} of the loss is not a tensor")
            factor = has_samples if is_counted else float(lane.samples)
            self._put(name, row, self.layout.sum_at(number), total, factor)
            if isinstance(count, Tensor):
                self._put(name, row, self.layout.count_at(number), count, has_samples)
            else:
                self._put_count(name, row, self.layout.count_at(number), float(count) * has_samples)
        return output

    def _put_count(self, name: str, row: int, column: int, count: float) -> None:
        """Write a count once, before the lanes are recorded: a graph cannot follow a number of the host."""
        if (row, column) not in self._counts:
            self._counts[row, column] = count
            self.rows[row, column] = count
        elif count != (before := self._counts[row, column]):
            raise CannotCapture(
                f"the count of {name!r} is {count:g}, and was {before:g} before; return it as a tensor"
            )

    def _put(self, name: str, row: int, column: int, value: Tensor, factor: float) -> None:
        if value.numel() != 1 or value.device != self.rows.device:
            place = f"has shape {list(value.shape)} and is on {value.device}"
            raise CannotCapture(f"the value {name!r} of the loss {place}")
        if factor not in self._factors:
            self._factors[factor] = self.rows.new_tensor(factor)
        # Both have no dimension, so the product is computed in float64, as on the host.
        torch.mul(value.detach().reshape(()), self._factors[factor], out=self.rows[row, column])

    def head(self) -> Tensor:
        """Return the columns before the changes of buffers, in one piece."""
        return self.rows[:, : self.layout.flag].contiguous()

    def set_requests(self, save: bool, stop: bool) -> None:  # noqa: FBT001 - of one rank
        """Let the last row carry the requests of this rank."""
        if save or stop or self._has_requests:
            self._has_requests = save or stop
            self.rows[-1, _REQUESTS] = self.rows.new_tensor([float(save), float(stop)])

    def read_later(self, head: Tensor, where: StepLanes) -> Losses:
        """Start to copy the numbers of a single rank to the host, which does not wait for them."""
        layout = self.layout
        numbers = self._later.copy(head, partial(_check, layout, where))
        sums: dict[str, float | AsyncSum] = {}
        counts: dict[str, float | AsyncSum] = {}
        for number, (name, is_counted) in enumerate(zip(*layout, strict=True)):
            sums[name] = numbers.column(layout.sum_at(number))
            counted = numbers.column(layout.count_at(number))
            counts[name] = counted if is_counted else float(where.samples)
        return Losses(sums, counts)

    def losses(self, total: Note) -> Losses:
        """Return the means in a sum of notes, given without the number that tells of missing gradients."""
        others = len(self.layout.names) - 1
        numbers = total.moves[: 2 * others].tolist()
        sums = [float(total.loss), *numbers[:others]]
        return means(self.layout.names, sums, [float(total.counted), *numbers[others:]])


def _check(layout: NoteLayout, where: StepLanes, rows: list[list[float]]) -> None:
    where.refuse_not_finite(rows, late=True)
    if layout.by_count:
        refuse_no_count(tree_total([row[1] for row in rows]), where.step)
