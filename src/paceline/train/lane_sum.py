"""How lane gradients are added: along the fixed tree, or in whatever order is fastest.

A lane also leaves a *note* (its loss, its count, what it did to the buffers), whose numbers are added the same way.
The note travels with a small bucket of gradients, so it costs no message of its own.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import TrainingError
from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.train.async_loss import AsyncLoss
from paceline.world.collectives import sum_across
from paceline.world.world import World

Moves = NDArray[numpy.float64]
NO_MOVES: Moves = numpy.zeros(0)
NOTE_HEAD = 4
"""Numbers of a note before the moves."""


class RankRequests(NamedTuple):
    """What one rank asks of all, after the step under way."""

    save: bool = False
    stop: bool = False


class Note(NamedTuple):
    """What a lane says beside its gradients; also the sum of such notes."""

    loss: float | AsyncLoss
    """The sum of the loss over what was counted."""
    counted: float
    moves: Moves = NO_MOVES
    """How far the buffers moved."""
    save: float = 0.0
    """How many ranks ask for a checkpoint after this step."""
    stop: float = 0.0
    """How many ranks were told to stop after this step."""

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

    def asking(self, asks: RankRequests) -> Note:
        """Return the note with what its rank asks for."""
        return self._replace(save=float(asks.save), stop=float(asks.stop)) if any(asks) else self

    def to_tensor(self) -> Tensor:
        """Return the note as it travels."""
        head = torch.tensor(
            [float(self.loss), self.counted, self.save, self.stop], dtype=torch.float64
        )
        return torch.cat([head, torch.from_numpy(self.moves)]) if len(self.moves) else head

    @classmethod
    def from_tensor(cls, values: Tensor) -> Note:
        """Return the note that travelled."""
        loss, counted, save, stop = values[:NOTE_HEAD].tolist()
        return cls(
            loss,
            counted,
            values[NOTE_HEAD:].numpy() if len(values) > NOTE_HEAD else NO_MOVES,
            save,
            stop,
        )


class LaneSum(Protocol):
    """The sum of one step's lane gradients, which ends up in the parameters' `grad`."""

    scale: float
    """What the gradient of every lane must be multiplied with beforehand."""
    totals_are_global: bool
    """Whether `finish` returns sums over all ranks, at no cost of its own."""
    idle: int
    """Lanes that this rank must run before its own, only so that others get its part of the weights."""

    def begin(self) -> None:
        """Start a step with no gradients."""

    def before_lane(self, note: Note) -> None:
        """Take a lane's note; its backward comes next. That of the last lane may sum across ranks as it goes."""

    def after_lane(self) -> None:
        """Take the gradients of a lane that is not this rank's last."""

    def finish(self) -> Note:
        """Leave the sum in `grad` and return the sum of the notes, over the ranks that are known so far."""

    def total(self, note: Note) -> Note:
        """Return a sum of finished notes over all ranks. Every rank must call this."""


class TreeStack:
    """Sums of whole subtrees of a rank's lanes, added as soon as both halves are there."""

    def __init__(
        self, parameters: list[nn.Parameter], lanes: int, rank: int = 0, size: int = 1
    ) -> None:
        self.parameters = parameters
        self._merges = merges_after(share(lanes, rank, size), lanes)
        self.gradients: list[list[Tensor]] = []
        self.notes: list[Note] = []
        self.pending_additions = 0
        """Additions that the lane under way still owes to the newest sums."""

    def clear(self) -> None:
        """Forget the step before."""
        self._lane = 0
        self.gradients.clear()
        self.notes.clear()

    def before_lane(self, note: Note) -> None:
        """Add a lane's note, and let its backward add to its sibling's gradients where that is due."""
        self.pending_additions = self._merges[self._lane]
        self._lane += 1
        self._add_note(note, self.pending_additions)
        if (
            self.pending_additions
        ):  # backward adds in place, which are the bits of the tree's own addition
            self.pending_additions -= 1
            for parameter, sibling in zip(self.parameters, self.gradients.pop(), strict=True):
                parameter.grad = sibling
        else:
            drop_gradients(self.parameters)

    def take_notes(self, notes: list[Note]) -> None:
        """Put the notes of all lanes of a step that was replayed in the place of those that are held."""
        self.notes.clear()
        for note, merges in zip(notes, self._merges, strict=True):
            self._add_note(note, merges)

    def _add_note(self, note: Note, merges: int) -> None:
        self.notes.append(note)
        for _ in range(merges):
            newest = self.notes.pop()
            self.notes[-1] = self.notes[-1].plus(newest)

    def after_lane(self) -> None:
        """Take one lane's gradients out of the parameters."""
        newest = gradients_of(self.parameters)
        for _ in range(self.pending_additions):
            torch._foreach_add_(newest, self.gradients.pop())
        self.gradients.append(newest)


class LocalTree:
    """The fixed tree in a world of one rank."""

    scale = 1.0
    totals_are_global = True
    idle = 0

    def __init__(self, parameters: list[nn.Parameter], lanes: int) -> None:
        self._stack = TreeStack(parameters, lanes)
        self.begin = self._stack.clear
        self.before_lane = self._stack.before_lane
        self.after_lane = self._stack.after_lane

    def finish(self) -> Note:
        """Add what the last lane still owes; the sum is in the parameters."""
        for _ in range(self._stack.pending_additions):
            torch._foreach_add_(gradients_of(self._stack.parameters), self._stack.gradients.pop())
        return self._stack.notes[0]

    def total(self, note: Note) -> Note:
        """Return the note: there is no other rank."""
        return note


class FreeSum:
    """Sums in the order that is cheapest: in place within a rank, by DDP's own all-reduce across ranks."""

    idle = 0

    def __init__(self, parameters: list[nn.Parameter], world: World) -> None:
        self.totals_are_global = world.size == 1
        self.scale = float(world.size)  # DDP divides by the number of ranks; a sum is wanted
        self._parameters = parameters
        self._world = world

    def begin(self) -> None:
        """Start a step with no gradients."""
        drop_gradients(self._parameters)
        self._note: Note | None = None

    def before_lane(self, note: Note) -> None:
        """Keep the note; the gradients add up in place."""
        self._note = note if self._note is None else self._note.plus(note)

    def after_lane(self) -> None:
        """Leave the gradients where they are."""

    def finish(self) -> Note:
        """Return the sum of this rank's notes: a message a step would cost more than it tells."""
        assert self._note is not None
        return self._note

    def total(self, note: Note) -> Note:
        """Add a note up over all ranks."""
        return Note.from_tensor(sum_across(self._world, note.to_tensor()))


def drop_gradients(parameters: list[nn.Parameter]) -> None:
    """Let the next backward write fresh gradients."""
    for parameter in parameters:
        parameter.grad = None


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters; all must be there."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(found) < len(parameters):
        raise missing_gradient(len(parameters), len(parameters) - len(found))
    return found


def missing_gradient(count: int, missing: int) -> TrainingError:
    """Return the error for parameters that the loss does not reach; DDP would wait for them for ever."""
    return TrainingError(
        f"{missing} of {count} trainable parameters got no gradient from the loss",
        fix="use them in forward, or call requires_grad_(False) on them before the model is parallelized",
    )
