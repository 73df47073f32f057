"""Sums of gradients over a rank's own lanes: whole subtrees of the fixed tree.

A parameter without a gradient in some lanes counts as zeros there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.train.gradients.note import Note, merge_notes

LaneGradients = list[Tensor | None]
"""The gradient of each parameter; None for one that a lane did not reach."""


class LaneStack:
    """Gradient sums of complete subtrees of this rank's lanes, merged as soon as both halves exist."""

    def __init__(self, parameters: list[nn.Parameter], merges: list[int]) -> None:
        self.parameters, self._merges = parameters, merges
        self.clear()

    def clear(self) -> None:
        """Discard the previous update."""
        self._lane = self.left = 0
        self.sums: list[LaneGradients] = []
        self._lane_notes: list[Note] = []
        self._sibling: LaneGradients = []
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
        self._versions = [_writes(value) for value in self._sibling] if merges else []
        for parameter, value in zip(self.parameters, self._sibling, strict=True):
            parameter.grad = value

    def after_lane(self) -> LaneGradients:
        """Return the gradients after a lane's backward, those of its sibling included."""
        now = [parameter.grad for parameter in self.parameters]
        given = self._given(now)
        if self.is_complete and all(given):
            self.reached = given
            return now
        self.is_complete = False
        padded: list[Tensor] = []
        for number, (value, sibling) in enumerate(zip(now, self._sibling, strict=True)):
            self.reached[number] |= given[number]
            is_alone = sibling is None or not given[number]
            if value is not None and self._has_sibling and is_alone:
                padded.append(value)
        add_zeros(padded)
        return now

    def _given(self, now: LaneGradients) -> list[bool]:
        """Return whether the backward of the lane gave each parameter a gradient."""
        if not self._has_sibling:
            return [value is not None for value in now]
        before = zip(now, self._sibling, self._versions, strict=True)
        return [
            value is not sibling or _writes(value) != writes for value, sibling, writes in before
        ]

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
