"""How the gradients of lanes are added: along a fixed tree, or in the fastest order.

Each lane also has a `Note` (loss, count, changes of the buffers), whose numbers are added in the same
order. Notes travel with a small bucket of gradients, so they need no message of their own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.errors import TrainingError
from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.train.note import Note
from paceline.world.collectives import sum_across
from paceline.world.world import World


class LaneSum(Protocol):
    """Adds the lane gradients of one step; the sum ends up in each parameter's `grad`."""

    scale: float
    """Factor for the gradient of every lane before it is added."""
    totals_are_global: bool
    """Whether `finish` returns sums over all ranks without an extra message."""
    idle: int
    """Extra lanes that this rank must run first, so that other ranks can gather its shards."""

    def begin(self) -> None:
        """Start a step without gradients."""

    def before_lane(self, note: Note) -> None:
        """Take the note of a lane whose backward comes next. The last lane's backward may reduce across ranks."""

    def after_lane(self) -> None:
        """Take the gradients of a lane that is not this rank's last."""

    def finish(self) -> Note:
        """Leave the sum in `grad`; return the sum of the notes over the ranks known so far."""

    def total(self, note: Note) -> Note:
        """Return the sum of finished notes over all ranks. Every rank must call this."""


class TreeStack:
    """Gradient sums of complete subtrees of a rank's lanes, merged as soon as both halves exist."""

    def __init__(
        self, parameters: list[nn.Parameter], lanes: int, rank: int = 0, size: int = 1
    ) -> None:
        self.parameters = parameters
        self._merges = merges_after(share(lanes, rank, size), lanes)
        self.gradients: list[list[Tensor]] = []
        self.notes: list[Note] = []
        self.pending_additions = 0
        """Sums on the stack to which the current lane must still be added."""

    def clear(self) -> None:
        """Discard the previous step."""
        self._lane = 0
        self.gradients.clear()
        self.notes.clear()

    def before_lane(self, note: Note) -> None:
        """Add a lane's note; let its backward accumulate into its sibling's gradients if it has one."""
        self.pending_additions = self._merges[self._lane]
        self._lane += 1
        self._add_note(note, self.pending_additions)
        if not self.pending_additions:
            drop_gradients(self.parameters)
            return
        # Backward accumulates in place, with the same bits as the tree's addition.
        self.pending_additions -= 1
        for parameter, sibling in zip(self.parameters, self.gradients.pop(), strict=True):
            parameter.grad = sibling

    def replace_notes(self, notes: list[Note]) -> None:
        """Replace the notes by those of all lanes of a replayed step."""
        self.notes.clear()
        for note, merges in zip(notes, self._merges, strict=True):
            self._add_note(note, merges)

    def _add_note(self, note: Note, merges: int) -> None:
        self.notes.append(note)
        for _ in range(merges):
            newest = self.notes.pop()
            self.notes[-1] = self.notes[-1].plus(newest)

    def after_lane(self) -> None:
        """Move one lane's gradients from the parameters to the stack."""
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
        """Make the last additions; the sum is in the parameters."""
        stack = self._stack
        for _ in range(stack.pending_additions):
            torch._foreach_add_(gradients_of(stack.parameters), stack.gradients.pop())
        return stack.notes[0]

    def total(self, note: Note) -> Note:
        """Return the note as it is: there is no other rank."""
        return note


class FreeSum:
    """Adds in the cheapest order: in place within a rank, by DDP's all-reduce across ranks."""

    idle = 0

    def __init__(self, parameters: list[nn.Parameter], world: World) -> None:
        self.totals_are_global = world.size == 1
        self.scale = float(world.size)  # DDP divides by the number of ranks; we need the sum
        self._parameters = parameters
        self._world = world

    def begin(self) -> None:
        """Start a step without gradients."""
        drop_gradients(self._parameters)
        self._note: Note | None = None

    def before_lane(self, note: Note) -> None:
        """Keep the note; gradients accumulate in place."""
        self._note = note if self._note is None else self._note.plus(note)

    def after_lane(self) -> None:
        """Leave the gradients in the parameters."""

    def finish(self) -> Note:
        """Return the sum of this rank's notes: a message per step would cost too much."""
        assert self._note is not None
        return self._note

    def total(self, note: Note) -> Note:
        """Return the sum of a note over all ranks."""
        return Note.from_tensor(sum_across(self._world, note.to_tensor()))


def drop_gradients(parameters: list[nn.Parameter]) -> None:
    """Set `grad` to None, so that the next backward writes instead of accumulating."""
    for parameter in parameters:
        parameter.grad = None


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters; raise if one is missing."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) < len(parameters):
        raise missing_gradient(len(parameters), len(parameters) - len(gradients))
    return gradients


def missing_gradient(count: int, missing: int) -> TrainingError:
    """Return the error for parameters that the loss does not reach; DDP would wait for them forever."""
    return TrainingError(
        f"{missing} of {count} trainable parameters got no gradient from the loss",
        fix="use them in forward, or call requires_grad_(False) on them before the model is parallelized",
    )
