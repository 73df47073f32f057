"""What travels beside the gradients: one row of numbers per lane, on the device that trains.

Each lane writes its row. Rows are added along the tree of the gradients and sent with the last bucket. The host reads
the total once per step. A CUDA graph writes the same rows, in memory that stays where it is.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.data.reading.batches import Lane, RankBatch
from paceline.errors import ConfigError, TrainingError
from paceline.exact.loss import Losses, not_finite, single_number

MAX_PENDING_STEPS = 64
"""Steps whose numbers may be on their way to the host. After that many the GPU has long finished the first of them."""
LATE = "some steps later, because the step was replayed as a CUDA graph"


class RankRequests(NamedTuple):
    """A rank's requests to all ranks, granted after the current step."""

    save: bool = False
    stop: bool = False


class Layout(NamedTuple):
    """What the columns of a row hold: first the sum of each value of the loss, then its count, then what follows.

    >>> layout = Layout.of({"loss": (6.0, 3), "kl": 0.5}, buffers=3)
    >>> layout.names, layout.counted, layout.counts, layout.save, layout.buffer, layout.head, layout.length
    (('loss', 'kl'), (True, False), 2, 4, 7, 8, 11)
    """

    names: tuple[str, ...]
    """The values that the loss function returns; the loss is the first, so its sum is column 0."""
    counted: tuple[bool, ...]
    """Whether each value came as (sum, count)."""
    largest: int
    """How many of the last columns are not added: the largest one of all lanes counts."""
    counts: int
    """Where the counts begin: the samples or tokens of each value."""
    save: int
    """How many ranks ask for a checkpoint after this step."""
    stop: int
    """How many ranks ask to stop after this step."""
    missing: int
    """How many ranks have a parameter without a gradient in some lane."""
    buffer: int
    """Not 0 if forward changed a buffer for which rows have no columns yet, or to a number that they cannot hold."""
    head: int
    """How many columns the host reads; those of the buffers follow."""
    length: int
    """All columns."""

    @classmethod
    def of(cls, values: Mapping[str, Any], buffers: int = 0, largest: int = 0) -> Layout:
        """Return the layout for the values of a loss, and this many numbers of buffers."""
        counted = tuple(map(_is_counted, values.values()))
        count = len(counted)
        save, head = 2 * count, 2 * count + 4
        flags = save, save + 1, save + 2, save + 3
        return cls(tuple(values), counted, largest, count, *flags, head, head + buffers)

    @property
    def by_count(self) -> bool:
        """Whether gradients must be divided by the count of all lanes."""
        return self.counted[0]


def _is_counted(value: Any) -> bool:
    return isinstance(value, tuple)


class StepSums(NamedTuple):
    """What the host knows of a step: sums over its lanes."""

    loss: float | Later = 0.0
    """Sum of the loss over the counted samples or tokens."""
    counted: float | Later = 0.0
    save: float = 0.0
    """Number of ranks that request a checkpoint after this step."""
    stop: float = 0.0
    """Number of ranks that request a stop after this step."""

    def plus(self, other: StepSums) -> StepSums:
        """Return the sum of both."""
        return StepSums(
            float(self.loss) + float(other.loss),
            float(self.counted) + float(other.counted),
            self.save + other.save,
            self.stop + other.stop,
        )

    def with_requests(self, requests: RankRequests) -> StepSums:
        """Return these sums with the requests of this rank."""
        return self._replace(save=float(requests.save), stop=float(requests.stop))

    def to_tensor(self) -> Tensor:
        """Return the four numbers as a tensor, to be added over ranks."""
        numbers = [float(self.loss), float(self.counted), self.save, self.stop]
        return torch.tensor(numbers, dtype=torch.float64)


class Rows:
    """The rows of one update: one for each lane of this rank."""

    def __init__(self, layout: Layout, lanes: int, device: torch.device) -> None:
        self.layout = layout
        self.numbers = torch.zeros(lanes, layout.length, dtype=torch.float64, device=device)
        names = len(layout.names)
        self.of_lanes = list(self.numbers)
        """The row of each lane, as a view."""
        self._sums = [[row[column] for column in range(names)] for row in self.of_lanes]
        self._counts = [[row[names + column] for column in range(names)] for row in self.of_lanes]
        self._values = self.numbers[:, : 2 * names]
        self._flags = self.numbers[:, layout.save : layout.head]
        self._factors = torch.ones_like(self._values)
        """What each number is multiplied with, once all lanes have written theirs."""
        self._written: dict[tuple[int, int], float] = {}
        """Factors and counts of the host that were written before: most are the same in every update."""

    def clear(self) -> None:
        """Remove the requests and flags of the update before."""
        self._flags.zero_()

    def write(self, row: int, values: Mapping[str, Any], lane: Lane) -> None:
        """Write what the loss of a lane returned: means over its samples, or (sum, count).

        A lane without samples computes on samples of another one, and counts nothing.
        """
        samples = lane.samples
        if tuple(values) != self.layout.names:
            raise ConfigError(
                f"the loss returned {', '.join(values)} for lane {lane.number}, and "
                f"{', '.join(self.layout.names)} for the lane before it",
                fix="return the same names for every batch",
            )
        has_samples = float(samples > 0)
        names = len(self.layout.names)
        for column, (name, value) in enumerate(values.items()):
            total, count = value if isinstance(value, tuple) else (value, None)
            self._put(self._sums[row][column], single_number(name, total))
            self._set_factor(row, column, float(samples) if count is None else has_samples)
            counted = float(lane.samples) if count is None else single_number(name, count)
            if isinstance(counted, Tensor):
                self._put(self._counts[row][column], counted)
                self._set_factor(row, names + column, has_samples)
            else:
                self._put_count(row, column, counted * has_samples)
                self._set_factor(row, names + column, 1.0)

    def complete(self) -> None:
        """Multiply means by their samples, once all lanes have written their rows."""
        self._values.mul_(self._factors)

    def _put(self, place: Tensor, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            value = value.detach()  # copied as float64, so products are those of Python
            place.copy_(value if value.ndim == 0 else value.reshape(()))
        else:
            place.fill_(value)

    def _set_factor(self, row: int, column: int, factor: float) -> None:
        if self._written.get((row, column), 1.0) != factor:
            self._written[row, column] = factor
            self._factors[row, column] = factor

    def _put_count(self, row: int, column: int, count: float) -> None:
        key = row, -1 - column
        if self._written.get(key) != count:
            self._written[key] = count
            self._counts[row][column].fill_(count)

    def set_requests(self, requests: RankRequests) -> None:
        """Let the last row carry the requests of this rank."""
        for column, is_asked in zip((self.layout.save, self.layout.stop), requests, strict=True):
            if is_asked:
                self.numbers[-1, column] = 1.0

    def loss_of_lanes(self) -> list[float]:
        """Return the sum of the loss in each lane of this rank, on the host."""
        return [float(number) for number in self.numbers[:, 0].tolist()]

    def head(self) -> Tensor:
        """Return the columns before the changes of buffers, in one piece."""
        return self.numbers[:, : self.layout.head].contiguous()

    def step_sums(self, numbers: list[float]) -> StepSums:
        """Return the sums of a step from the head of its total."""
        layout = self.layout
        first = numbers[0], numbers[layout.counts]
        return StepSums(*first, numbers[layout.save], numbers[layout.stop])

    def losses(self, numbers: list[float]) -> Losses:
        """Return the mean of each value, from the head of the total."""
        layout = self.layout
        sums = dict(zip(layout.names, numbers[: layout.counts], strict=True))
        return Losses(
            sums, dict(zip(layout.names, numbers[layout.counts : layout.save], strict=True))
        )


def added(row: Tensor, later: Tensor, largest: int) -> Tensor:
    """Return the sum of the rows of two neighbours in the tree; of the last columns, the larger one.

    >>> added(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 4.0]), 1), added(torch.ones(2), torch.ones(2), 0)
    (tensor([3., 5.]), tensor([2., 2.]))
    """
    total = row + later
    if largest:
        torch.maximum(row[-largest:], later[-largest:], out=total[-largest:])
    return total


def merge_rows(rows: Iterable[Tensor], merges: Iterable[int], largest: int = 0) -> list[Tensor]:
    """Return the sums of the rows of whole subtrees, given how many merges follow each lane.

    >>> [row.tolist() for row in merge_rows(torch.tensor([[1.0, 1], [2.0, 1], [4.0, 1]]), [0, 1, 0])]
    [[3.0, 2.0], [4.0, 1.0]]
    """
    merged: list[Tensor] = []
    for row, count in zip(rows, merges, strict=True):
        newest = row
        for _ in range(count):
            newest = added(merged.pop(), newest, largest)
        merged.append(newest)
    return merged


class StepLanes(NamedTuple):
    """Which lanes of which step a rank has run: what an error needs, without the batch."""

    step: int
    samples: int
    """Samples of all ranks."""
    lanes: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, step: RankBatch, rank: int) -> StepLanes:
        """Return what is known of a step."""
        lanes = tuple(lane.number for lane in step.lanes)
        return cls(step.plan.index, step.plan.samples, lanes, rank)

    def not_finite(self, sums: list[float]) -> str:
        """Return the first lane of this rank whose loss is inf or nan, after that value; "" if there is none."""
        for lane, value in zip(self.lanes, sums, strict=True):
            if not math.isfinite(value):
                return f"{value} lane {lane} (rank {self.rank})"
        return ""

    def error(self, found: str, when: str) -> TrainingError:
        """Return the error for what `not_finite` found."""
        value, _, where = found.partition(" ")
        return not_finite(float(value), self.step, where, when)


class Later:
    """A number of a replayed step that is still being copied from the GPU: `float` waits for it."""

    def __init__(self, numbers: PendingNumbers, column: int) -> None:
        self._numbers, self._column = numbers, column

    def __float__(self) -> float:
        return self._numbers.total()[self._column]


class PendingNumbers:
    """The total and the rows of one step, known once their copy has arrived on the host."""

    def __init__(
        self,
        copy: Tensor,
        arrived: torch.cuda.Event,
        check: Callable[[list[list[float]]], None],
    ) -> None:
        self._copy, self._arrived, self._check = copy, arrived, check
        self._rows: list[list[float]] | None = None

    def total(self) -> list[float]:
        """Return the head of the total; the first call waits for the copy, and raises if the step has failed."""
        if self._rows is None:
            self._arrived.synchronize()
            self._rows = self._copy.tolist()
            self._check(self._rows)
        return self._rows[0]


class PinnedRows:
    """Pinned host memory for the numbers of the last steps of a single rank, whose host does not wait for the loss."""

    def __init__(self, rows: int, columns: int) -> None:
        shape = MAX_PENDING_STEPS, rows, columns
        memory = torch.zeros(shape, dtype=torch.float64, pin_memory=True)
        slots = [(place, torch.cuda.Event()) for place in memory]  # type: ignore[no-untyped-call]
        self._slots = itertools.cycle(slots)
        self._pending: deque[PendingNumbers] = deque()

    def copy(self, rows: Tensor, check: Callable[[list[list[float]]], None]) -> PendingNumbers:
        """Start to copy the total of a step, followed by its rows."""
        if len(self._pending) == MAX_PENDING_STEPS:
            self._pending.popleft().total()
        place, arrived = next(self._slots)
        place.copy_(rows, non_blocking=True)
        arrived.record()
        numbers = PendingNumbers(place, arrived, check)
        self._pending.append(numbers)
        return numbers
