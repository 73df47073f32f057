"""The few numbers that travel with a lane's gradients: loss, count, buffer changes, requests to save or stop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.telemetry.phases import PhaseClock
from paceline.train.step.async_sums import AsyncSum

Moves = NDArray[numpy.float64]
NO_MOVES: Moves = numpy.zeros(0)
NOTE_HEAD = 4
"""Numbers of a note before its moves."""


class RankRequests(NamedTuple):
    """A rank's requests to all ranks, granted after the current step."""

    save: bool = False
    stop: bool = False


class Note(NamedTuple):
    """Results of a lane besides its gradients; also the sum of such notes."""

    loss: float | AsyncSum
    """Sum of the loss over the counted samples or tokens."""
    counted: float | AsyncSum
    moves: Moves = NO_MOVES
    """Changes of the buffers, such as BatchNorm's running mean."""
    save: float = 0.0
    """Number of ranks that request a checkpoint after this step."""
    stop: float = 0.0
    """Number of ranks that request a stop after this step."""

    def plus(self, other: Note) -> Note:
        """Return the sum of two notes."""
        moves = self.moves + other.moves if len(self.moves) else NO_MOVES
        return Note(
            float(self.loss) + float(other.loss),
            float(self.counted) + float(other.counted),
            moves,
            self.save + other.save,
            self.stop + other.stop,
        )

    def with_requests(self, requests: RankRequests) -> Note:
        """Return the note with the requests of its rank."""
        if not any(requests):
            return self
        return self._replace(save=float(requests.save), stop=float(requests.stop))

    def to_tensor(self) -> Tensor:
        """Return the note as float64 numbers, ready to be sent."""
        numbers = [float(self.loss), float(self.counted), self.save, self.stop]
        head = torch.tensor(numbers, dtype=torch.float64)
        if not len(self.moves):
            return head
        return torch.cat([head, torch.from_numpy(self.moves)])

    @classmethod
    def from_tensor(cls, values: Tensor) -> Note:
        """Return the note that `to_tensor` wrote."""
        loss, counted, save, stop = values[:NOTE_HEAD].tolist()
        moves = values[NOTE_HEAD:].numpy() if len(values) > NOTE_HEAD else NO_MOVES
        return cls(loss, counted, moves, save, stop)


def merge_notes(notes: Iterable[Note], merges: Iterable[int]) -> list[Note]:
    """Return the sums of the notes of whole subtrees, given how many merges follow each lane.

    >>> [note.loss for note in merge_notes([Note(1.0, 1), Note(2.0, 1), Note(4.0, 1)], [0, 1, 0])]
    [3.0, 4.0]
    """
    merged: list[Note] = []
    for note, count in zip(notes, merges, strict=True):
        merged.append(note)
        for _ in range(count):
            newest = merged.pop()
            merged[-1] = merged[-1].plus(newest)
    return merged


def merge_rows(rows: Tensor, merges: Iterable[int]) -> list[Tensor]:
    """Do what `merge_notes` does with notes that are rows of a tensor.

    >>> [row.tolist() for row in merge_rows(torch.tensor([[1.0, 1], [2.0, 1], [4.0, 1]]), [0, 1, 0])]
    [[3.0, 2.0], [4.0, 1.0]]
    """
    merged: list[Tensor] = []
    for row, count in zip(rows, merges, strict=True):
        newest = row
        for _ in range(count):
            newest = merged.pop() + newest
        merged.append(newest)
    return merged


class StepEngine(Protocol):
    """What runs the steps of a training, as its observers see it."""

    clock: PhaseClock
    """Measures the time of each phase on this rank."""
    ready: float
    """`time.perf_counter` at the end of this rank's own work in the last step."""
    synchronized: bool
    """Whether local SGD replicas were synchronized after the last step."""

    @property
    def totals_are_global(self) -> bool:
        """Whether a step returns sums over all ranks already."""

    def total(self, note: Note) -> Note:
        """Return the sum of a note over all ranks. Every rank must call this."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks. Every rank must call this."""
