"""What the lanes of an update leave behind: compared between a replay and an eager run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.train.gradients.lane_stack import LaneGradients
from paceline.train.gradients.protocol import LaneResults


class CannotCapture(Exception):
    """Why an update cannot be captured as a CUDA graph."""


_FREE = 1e-2
"""Relative difference of losses that kernels without a fixed order may cause."""


class Outcome(NamedTuple):
    """Notes, gradients and buffers after the lanes of an update."""

    rows: Tensor
    gradients: LaneGradients
    buffers: list[Tensor]

    def difference_from(self, eager: Outcome, lanes: list[int], *, exact: bool) -> str:
        """Return how a replay differs from an eager run: in any bit if `exact`, otherwise in a loss; "" if it does not.

        >>> eager = Outcome(torch.tensor([[2.0, 4.0]]), [torch.ones(3)], [])
        >>> eager._replace(rows=torch.tensor([[2.5, 4.0]])).difference_from(eager, [3], exact=True)
        'the sum of the losses of lane 3 is 2.5, not 2'
        >>> eager._replace(gradients=[torch.zeros(3)]).difference_from(eager, [3], exact=True)
        'a gradient has other bits'
        """
        pairs = zip(lanes, self.rows[:, 0].tolist(), eager.rows[:, 0].tolist(), strict=True)
        for lane, now, wanted in pairs:
            is_near = math.isclose(now, wanted, rel_tol=0.0 if exact else _FREE)
            if math.isfinite(wanted) and not is_near:
                return f"the sum of the losses of lane {lane} is {now:.8g}, not {wanted:.8g}"
        if not exact or not eager.rows.isfinite().all():
            return ""
        if not torch.equal(self.rows, eager.rows):
            return "a value of the loss, or a buffer, has other bits"
        if not same(self.gradients, eager.gradients):
            return "a gradient has other bits"
        return "" if same(self.buffers, eager.buffers) else "a buffer has other bits"


def same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Return whether tensors are equal, each of one list to that of the other."""
    pairs = zip(some, others, strict=True)
    return all(a is not None and b is not None and _equal(a, b) for a, b in pairs)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal numbers; nan equals nan."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def flat(results: LaneResults) -> LaneGradients:
    """Return the gradients of all lanes and subtrees."""
    return [*results.newest, *(value for subtree in results.sums for value in subtree)]


def values_of(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return copies of all buffers."""
    return [buffer.clone() for model in models for buffer in model.buffers()]


def restore(models: Sequence[nn.Module], values: list[Tensor]) -> None:
    """Give all buffers the values that `values_of` returned."""
    buffers = [buffer for model in models for buffer in model.buffers()]
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


@contextlib.contextmanager
def restored(models: Sequence[nn.Module]) -> Iterator[None]:
    """Give all buffers the values that they had before."""
    before = values_of(models)
    try:
        yield
    finally:
        restore(models, before)
