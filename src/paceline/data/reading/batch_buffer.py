"""Host buffers for samples, which later batches reuse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[numpy.uint8]


class BatchBuffer(NamedTuple):
    """Memory for a fixed number of samples: one tensor per column."""

    tensors: tuple[Tensor, ...]
    rows: tuple[Rows, ...]
    """The same memory as bytes, one row per sample.

    numpy has no bfloat16, and it copies rows faster than torch.
    """

    def first(self, count: int) -> tuple[Tensor, ...]:
        """Return the tensors, cut to `count` samples."""
        if count == len(self.rows[0]):
            return self.tensors
        return tuple(tensor[:count] for tensor in self.tensors)


def allocate_buffer(
    count: int, columns: Iterable[tuple[torch.dtype, tuple[int, ...]]], *, pinned: bool = False
) -> BatchBuffer:
    """Return memory for `count` samples; a column is given as (dtype, shape of one sample).

    >>> allocate_buffer(3, [(torch.bfloat16, (5,))]).rows[0].shape
    (3, 10)
    """
    tensors: list[Tensor] = []
    rows: list[Rows] = []
    for dtype, shape in columns:
        tensor = torch.empty((count, *shape), dtype=dtype, pin_memory=pinned)
        tensors.append(tensor)
        rows.append(as_rows(tensor.view(-1).view(torch.uint8).numpy(), count))
    return BatchBuffer(tuple(tensors), tuple(rows))


def as_rows(array: NDArray[Any], count: int) -> Rows:
    """View an array as `count` rows of bytes."""
    flat = array.reshape(-1).view(numpy.uint8)
    return flat.reshape(count, flat.size // max(1, count))
