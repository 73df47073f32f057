"""Buckets of gradients that cross in one message, and where each gradient lies in their flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.train.gradients.bucket_exchange import Exchange
from paceline.train.gradients.lane_stack import LaneGradients

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first message starts early
OTHER_BUCKET_BYTES = 25 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of each size in bytes."""


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients cross in one message."""

    numbers: list[int]
    parameters: list[Tensor]
    total: Tensor
    exchange: Exchange
    waiting: int = 0
    """Parameters whose gradient the last lane has not computed yet."""
    is_early: bool = True
    """Whether a gradient is final when it was written once, so that the bucket may be sent during backward."""
    is_sent: bool = False
    """Whether it was sent in this update."""
    sent: Tensor | None = None
    """Checksums of this rank's gradients when they were sent, in the updates that are checked."""

    def choose(self, gradients: LaneGradients) -> LaneGradients:
        """Return the gradients of its parameters, of those of all parameters."""
        return [gradients[number] for number in self.numbers]


def make_buckets(
    parameters: Sequence[nn.Parameter],
    first_bytes: int = FIRST_BUCKET_BYTES,
    other_bytes: int = OTHER_BUCKET_BYTES,
) -> list[list[int]]:
    """Return the numbers of the parameters of each bucket; backward reaches the last parameters first.

    >>> make_buckets([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1 << 18)), nn.Parameter(torch.zeros(2))])
    [[2, 1], [0]]
    """
    buckets: list[list[int]] = []
    newest: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    limit = first_bytes
    for number in reversed(range(len(parameters))):
        value = parameters[number]
        if value.dtype not in newest:
            newest[value.dtype], sizes[value.dtype] = [], 0
            buckets.append(newest[value.dtype])
        newest[value.dtype].append(number)
        sizes[value.dtype] += value.nbytes
        if sizes[value.dtype] >= limit:
            del newest[value.dtype]
            limit = other_bytes
    return buckets


def laid_out(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return a view of each parameter in a flat bucket, with the strides of the parameter.

    >>> image = torch.zeros(1, 2, 2, 1).to(memory_format=torch.channels_last)
    >>> laid_out(torch.arange(5), [image, torch.zeros(1)])[0].flatten().tolist()
    [0, 2, 1, 3]
    """
    pieces = torch.split(flat, [value.numel() for value in parameters])
    views = []
    for piece, value in zip(pieces, parameters, strict=True):
        if _is_dense(value):
            views.append(piece.as_strided(value.shape, value.stride()))
        else:
            views.append(piece.view(value.shape))
    return views


def checksums(values: LaneGradients) -> Tensor:
    """Return a number for each gradient that changes with any of its bits; it stays on their device.

    >>> checksums([torch.tensor([1.0, 2.0]), None]).tolist() == checksums([torch.tensor([1.0, 2.5]), None]).tolist()
    False
    """
    sums = []
    device = next((value.device for value in values if value is not None), None)
    for value in values:
        if value is None:
            sums.append(torch.zeros((), dtype=torch.int64, device=device))
        else:
            sums.append(value.view(_INTEGERS[value.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums)


def filled(like: Tensor, parameters: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return a flat copy of one value per parameter of a bucket."""
    flat = torch.empty_like(like)
    torch._foreach_copy_(laid_out(flat, parameters), values)
    return flat


def _is_dense(value: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dimensions."""
    dimensions = zip(value.stride(), value.shape, strict=True)
    expected = 1
    for stride, size in sorted(pair for pair in dimensions if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat_gradients(bucket: Bucket, values: LaneGradients) -> Tensor:
    """Return gradients as one flat tensor, with zeros for those that are missing."""
    given = [value for value in values if value is not None]
    if len(given) == len(values):
        return filled(bucket.total, bucket.parameters, given)
    flat = torch.zeros_like(bucket.total)
    places = laid_out(flat, bucket.parameters)
    chosen = [place for place, value in zip(places, values, strict=True) if value is not None]
    if chosen:
        torch._foreach_copy_(chosen, given)
    return flat
