"""The few numbers that travel with a lane's gradients: loss, count, buffer changes, requests to save or stop."""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.train.async_loss import AsyncLoss

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

    loss: float | AsyncLoss
    """Sum of the loss over the counted samples or tokens."""
    counted: float
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
            self.counted + other.counted,
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
        numbers = [float(self.loss), self.counted, self.save, self.stop]
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
