"""Sums of gradients over a rank's own lanes: whole subtrees of the fixed tree.

A parameter without a gradient in some lanes counts as zeros there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.train.gradients.note import Note, merge_notes

LaneGradients = list[Tensor | None]
"""The gradient of each parameter; None for one that a lane did not reach."""


class WrittenAgain(Exception):
    """A lane has written a gradient several times into the sum with its sibling; earlier lanes wrote it once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class LaneStack:
    """Gradient sums of complete subtrees of this rank's lanes, merged as soon as both halves exist.

    The backward of a lane adds its gradients to those of its sibling in the tree, in place. That is the sum of two
    lanes only if it writes each gradient once. A backward that runs inside of another (`torch.utils.checkpoint` with
    use_reentrant=True) writes a gradient several times, and (a + b) + c is not a + (b + c). Such parameters are found
    by their number of writes in a lane without sibling, which is the first lane of every rank; they are added after
    the lane instead.
    """

    def __init__(
        self, parameters: list[nn.Parameter], merges: list[int], *, exact: bool = True
    ) -> None:
        self.parameters, self._merges, self._exact = parameters, merges, exact
        self._rewritten: set[int] = set()
        """Numbers of the parameters whose gradient a lane has written more than once."""
        self.clear()

    def clear(self) -> None:
        """Discard the previous update."""
        self._lane = self.left = 0
        self.writes = [0] * len(self.parameters)
        """How often each gradient was written since the previous lane; counted by hooks of the gradient sum."""
        self.sums: list[LaneGradients] = []
        self._lane_notes: list[Note] = []
        self._sibling: LaneGradients = []
        self._apart: dict[int, Tensor | None] = {}
        """Gradients of the sibling that are added after the lane."""
        self._versions: list[int] = []
        self.reached = [False] * len(self.parameters)
        """Whether any lane so far gave the parameter a gradient."""
        self.is_complete = True
        """Whether every lane so far gave every parameter a gradient."""

    def before_lane(self, note: Note) -> None:
        """Keep the lane's note; let its backward accumulate into the gradients of its sibling, if it has one."""
        self._lane_notes.append(note)
        merges = self._merges[self._lane]
        self._lane += 1
        self._has_sibling, self.left = merges > 0, max(0, merges - 1)
        self._sibling = self.sums.pop() if merges else [None] * len(self.parameters)
        self._apart = {}
        for number in self._rewritten if merges else ():
            self._apart[number], self._sibling[number] = self._sibling[number], None
        self._versions = [_writes(value) for value in self._sibling] if merges else []
        for parameter, value in zip(self.parameters, self._sibling, strict=True):
            parameter.grad = value

    def after_lane(self) -> LaneGradients:
        """Return the gradients after a lane's backward, those of its sibling included."""
        now = [parameter.grad for parameter in self.parameters]
        given = self._given(now)
        self._rewritten.update(number for number, writes in enumerate(self.writes) if writes > 1)
        self.writes = [0] * len(self.parameters)
        if not (self.is_complete and all(given)):
            self._pad(now, given)
        else:
            self.reached = given
        for number, earlier in self._apart.items():
            [now[number]] = added([earlier], [now[number]])
            self.parameters[number].grad = now[number]
        return now

    def _pad(self, now: LaneGradients, given: list[bool]) -> None:
        """Let a parameter that only one of two lanes has reached have the bits of a sum with zeros."""
        self.is_complete = False
        padded: list[Tensor] = []
        for number, (value, sibling) in enumerate(zip(now, self._sibling, strict=True)):
            self.reached[number] |= given[number]
            is_alone = (sibling is None or not given[number]) and number not in self._apart
            if value is not None and self._has_sibling and is_alone:
                padded.append(value)
        add_zeros(padded)

    def _given(self, now: LaneGradients) -> list[bool]:
        """Return whether the backward of the lane gave each parameter a gradient."""
        if not self._has_sibling:
            return [value is not None for value in now]
        given = []
        for number, value in enumerate(now):
            sibling, written = self._sibling[number], _writes(value) - self._versions[number]
            given.append(value is not sibling or written != 0)
            if self._exact and sibling is not None and value is sibling and written > 1:
                raise WrittenAgain(number)
        return given

    def load(self, newest: LaneGradients, sums: list[LaneGradients], notes: list[Note]) -> None:
        """Use the gradients and notes of lanes that were replayed."""
        for parameter, value in zip(self.parameters, newest, strict=True):
            parameter.grad = value
        self.sums, self._lane_notes = list(sums), notes
        self.reached = [True] * len(self.parameters)
        self.left = max(0, self._merges[-1] - 1)

    @property
    def notes(self) -> list[Note]:
        """The sums of the notes of whole subtrees."""
        return merge_notes(self._lane_notes, self._merges)

    def push(self, now: LaneGradients) -> None:
        """Merge a lane that is not this rank's last with the subtrees that it completes."""
        for _ in range(self.left):
            now = added(self.sums.pop(), now)
        self.sums.append(now)


def _writes(value: Tensor | None) -> int:
    """Return how often a tensor was written in place; -1 without a tensor."""
    return -1 if value is None else value._version  # noqa: SLF001 - torch has no public name for it


def added(earlier: LaneGradients, later: LaneGradients) -> LaneGradients:
    """Return the sums of two subtrees, in the memory of the later one; a missing gradient counts as zeros."""
    both = [(a, b) for a, b in zip(earlier, later, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([b for _, b in both], [a for a, _ in both])
    alone = []
    result: LaneGradients = []
    for a, b in zip(earlier, later, strict=True):
        if (a is None) is not (b is None):
            alone += [value for value in (a, b) if value is not None]
        result.append(a if b is None else b)
    add_zeros(alone)
    return result


def add_zeros(values: list[Tensor]) -> None:
    """Add 0.0, which turns -0.0 into 0.0: the bits of a sum with zeros that another rank has sent."""
    if values:
        torch._foreach_add_(values, 0.0)
