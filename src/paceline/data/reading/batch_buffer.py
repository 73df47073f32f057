"""Memory into which samples are copied, and which is used again for later ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[numpy.uint8]


class BatchBuffer(NamedTuple):
    """Memory for some samples: a tensor for every column."""

    tensors: tuple[Tensor, ...]
    rows: tuple[Rows, ...]
    """The same memory as bytes, a row for every sample: numpy knows no bfloat16, and copies rows faster than torch does."""

    def first(self, count: int) -> tuple[Tensor, ...]:
        """Return the tensors, cut to so many samples."""
        if count == len(self.rows[0]):
            return self.tensors
        return tuple(tensor[:count] for tensor in self.tensors)


def allocate_buffer(
    count: int, columns: Iterable[tuple[torch.dtype, tuple[int, ...]]], *, pinned: bool = False
) -> BatchBuffer:
    """Return memory for so many samples, whose columns are of these types and shapes.

    >>> allocate_buffer(3, [(torch.bfloat16, (5,))]).rows[0].shape
    (3, 10)
    """
    tensors = tuple(
        torch.empty((count, *shape), dtype=dtype, pin_memory=pinned) for dtype, shape in columns
    )
    return BatchBuffer(
        tensors,
        tuple(as_rows(tensor.view(-1).view(torch.uint8).numpy(), count) for tensor in tensors),
    )


def as_rows(array: NDArray[Any], count: int) -> Rows:
    """Return an array as so many rows of bytes."""
    flat = array.reshape(-1).view(numpy.uint8)
    return flat.reshape(count, flat.size // max(1, count))
