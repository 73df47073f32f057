"""The fixed tree without DDP: nothing crosses the ranks before all gradients are there, so that backward can be captured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.train.ddp_reduction import TreeReduction, filled, laid_out
from paceline.train.lane_sum import gradients_of
from paceline.train.note import Note


class LaneGradients(NamedTuple):
    """What the lanes of a rank leave behind: gradients, sums of whole subtrees, and how many of them are still to be added."""

    gradients: list[Tensor]
    sums: list[list[Tensor]]
    pending_additions: int


class ReduceAfterBackward(TreeReduction):
    """The sum of all ranks, in the order of the tree, of all gradients at once."""

    def finish(self) -> Note:
        """Sum what this rank's lanes left with what all others left; it ends up in the gradients."""
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._stack.parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        buckets = [
            _WholeBucket(part, number, last=number + 1 == len(by_type))
            for number, part in enumerate(by_type.values())
        ]
        for bucket in buckets:
            self.hook(bucket)  # type: ignore[arg-type]
        if self._side_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side_stream)
        for bucket in buckets:
            torch._foreach_copy_(gradients_of(bucket.parameters()), bucket.gradients())
        return super().finish()

    def lane_gradients(self) -> LaneGradients:
        """Return what the lanes of the step under way left behind."""
        return LaneGradients(
            gradients_of(self._stack.parameters),
            list(self._stack.gradients),
            self._stack.pending_additions,
        )

    def load_lanes(self, left: LaneGradients, notes: list[Note]) -> None:
        """Take what lanes that were replayed have left, as if they had run."""
        self._noted = None
        for parameter, gradient in zip(self._stack.parameters, left.gradients, strict=True):
            parameter.grad = gradient
        self._stack.gradients, self._stack.pending_additions = (
            list(left.sums),
            left.pending_additions,
        )
        self._stack.replace_notes(notes)


class _WholeBucket:
    """All gradients of a model of one type as one bucket."""

    def __init__(self, parameters: list[nn.Parameter], number: int, *, last: bool) -> None:
        self._parameters, gradients = parameters, gradients_of(parameters)
        self._number, self._last = number, last
        size = sum(value.numel() for value in gradients)
        self._flat = filled(gradients[0].new_empty(size), list[Tensor](parameters), gradients)
        self._views = laid_out(self._flat, list[Tensor](parameters))

    def index(self) -> int:
        """Return its number."""
        return self._number

    def is_last(self) -> bool:
        """Return whether no other comes."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients, one after the other."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter."""
        return self._views

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of their gradients."""
        return self._parameters
