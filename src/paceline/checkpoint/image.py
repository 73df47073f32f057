"""What lies where in a checkpoint's file, and which rank writes what of it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import tensorfile
from paceline.errors import BadCheckpoint
from paceline.tensorfile import TensorSpan


def read_places(start: bytes | memoryview, size_bytes: int, where: str) -> list[TensorSpan]:
    """Return where the tensors of a file lie, from its first bytes, which must hold the whole header."""
    try:
        return tensorfile.read_places(start, size_bytes)
    except ValueError as error:
        raise BadCheckpoint(
            f"{where} is not a safetensors file ({error})",
            fix="take another checkpoint: `paceline ckpt list`",
        ) from error


def split_by_size(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Deal things out to parts of about equal size: the largest first, each to the part that has least.

    >>> split_by_size([5, 1, 4, 3, 2], 2)
    [[0, 1, 4], [2, 3]]
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = loads.index(min(loads))
        found[least].append(number)
        loads[least] += sizes[number]
    return [sorted(part) for part in found]
