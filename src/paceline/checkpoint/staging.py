"""Host memory that holds a checkpoint file until it is written, laid out as on disk."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.dtypes import torch_dtypes
from paceline.tensorfile import Spec, plan_file

DTYPES = torch_dtypes()
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The safetensors name of a torch dtype."""


class Staging:
    """Page-aligned host memory, pinned for a GPU, reused from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._growing = threading.Lock()

    def prepare(self, tensors: Mapping[Spec, Tensor]) -> None:
        """Allocate memory for a file of these tensors, and touch every page of it."""
        if tensors:
            size = plan_file(tensors).size_bytes
            self._buffer(size, pinned=_on_gpu(tensors), touched=True)

    def fill(
        self, share: Mapping[Spec, Tensor], tensors: Iterable[tuple[Spec, Tensor]]
    ) -> memoryview | None:
        """Copy this rank's share of all `tensors` to its offsets in the file; return the file."""
        layout = plan_file(share)
        spans = {span.spec: span for span in layout.places}
        memory = self._buffer(layout.size_bytes, pinned=_on_gpu(share))
        memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        for spec, value in tensors:
            span = spans.get(spec)
            if span is not None and span.end > span.begin:
                memory[span.begin : span.end].copy_(flat_bytes(value), non_blocking=True)
        if _on_gpu(share):
            torch.cuda.current_stream().synchronize()
        return memoryview(memory.numpy()) if share else None  # type: ignore[arg-type]

    def _buffer(self, size: int, *, pinned: bool, touched: bool = False) -> Tensor:
        with self._growing:
            if len(self._memory) < size:
                self._memory = _page_aligned(size, pinned=pinned)
                if touched:
                    self._memory[:: mmap.PAGESIZE].zero_()
            return self._memory[:size]


def split_by_size(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of parts of similar total size, dealt greedily, the largest first.

    >>> split_by_size([5, 1, 4, 3, 2], 2)
    [[0, 1, 4], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += sizes[number]
    return [sorted(share) for share in shares]


def flat_bytes(value: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, as a file holds them."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _on_gpu(tensors: Mapping[Spec, Tensor]) -> bool:
    return any(value.is_cuda for value in tensors.values())


def _page_aligned(size: int, *, pinned: bool) -> Tensor:
    """Return memory that can be written to disk with O_DIRECT."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)
