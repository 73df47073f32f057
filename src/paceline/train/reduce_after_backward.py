"""The fixed tree without DDP: gradients are reduced after backward, so that backward can be captured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.train.ddp_reduction import TreeReduction, filled, laid_out
from paceline.train.lane_sum import gradients_of
from paceline.train.note import Note


class LaneGradients(NamedTuple):
    """Result of the lanes of a rank: the newest gradients, sums of subtrees, and how many of these to add."""

    gradients: list[Tensor]
    sums: list[list[Tensor]]
    pending_additions: int


class ReduceAfterBackward(TreeReduction):
    """Reduces all gradients at once over all ranks, in the order of the tree."""

    def finish(self) -> Note:
        """Add the lanes of all ranks; the sum ends up in the gradients."""
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._stack.parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        buckets = []
        for number, parameters in enumerate(by_type.values()):
            is_last = number + 1 == len(by_type)
            buckets.append(_WholeBucket(parameters, number, last=is_last))
        for bucket in buckets:
            self.hook(bucket)  # type: ignore[arg-type]
        if self._side_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side_stream)
        for bucket in buckets:
            torch._foreach_copy_(gradients_of(bucket.parameters()), bucket.gradients())
        return super().finish()

    def lane_gradients(self) -> LaneGradients:
        """Return the gradients of the lanes of the current step."""
        return LaneGradients(
            gradients_of(self._stack.parameters),
            list(self._stack.gradients),
            self._stack.pending_additions,
        )

    def load_lanes(self, lanes: LaneGradients, notes: list[Note]) -> None:
        """Use the gradients and notes of replayed lanes, as if the lanes had run."""
        self._notes_exchange = None
        for parameter, gradient in zip(self._stack.parameters, lanes.gradients, strict=True):
            parameter.grad = gradient
        self._stack.gradients, self._stack.pending_additions = (
            list(lanes.sums),
            lanes.pending_additions,
        )
        self._stack.replace_notes(notes)


class _WholeBucket:
    """All gradients of one dtype as one bucket, with the interface of DDP's GradBucket."""

    def __init__(self, parameters: list[nn.Parameter], number: int, *, last: bool) -> None:
        self._parameters, gradients = parameters, gradients_of(parameters)
        self._number, self._last = number, last
        size = sum(value.numel() for value in gradients)
        self._flat = filled(gradients[0].new_empty(size), list[Tensor](parameters), gradients)
        self._views = laid_out(self._flat, list[Tensor](parameters))

    def index(self) -> int:
        """Return the bucket's number."""
        return self._number

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter."""
        return self._views

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of their gradients."""
        return self._parameters
