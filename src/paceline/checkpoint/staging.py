"""Where a file waits in host memory until it is written: laid out as it will be on disk."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from paceline.dtypes import torch_dtypes
from paceline.tensorfile import Spec, plan_image

DTYPES = torch_dtypes()
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The safetensors name of a torch dtype."""


class Staging:
    """Page-aligned memory, pinned for a GPU, that is kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._growing = threading.Lock()

    def prepare(self, mine: Mapping[Spec, Tensor]) -> None:
        """Make room for a file of these tensors, and touch every page of it."""
        if mine:
            self._room(plan_image(mine).size_bytes, pinned=_on_gpu(mine), touched=True)

    def fill(
        self, mine: Mapping[Spec, Tensor], all_of_them: Iterable[tuple[Spec, Tensor]]
    ) -> memoryview | None:
        """Copy my tensors to where they will lie in the file, each as it comes, and return the file."""
        image = plan_image(mine)
        places = {place.spec: place for place in image.places}
        memory = self._room(image.size_bytes, pinned=_on_gpu(mine))
        memory[: len(image.header)] = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
        for spec, value in all_of_them:
            place = places.get(spec)
            if place is not None and place.end > place.begin:
                flat = (
                    value.detach()
                    .resolve_conj()
                    .resolve_neg()
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                )
                memory[place.begin : place.end].copy_(flat, non_blocking=True)
        if _on_gpu(mine):
            torch.cuda.current_stream().synchronize()
        return memoryview(memory.numpy()) if mine else None  # type: ignore[arg-type]

    def _room(self, size: int, *, pinned: bool, touched: bool = False) -> Tensor:
        with self._growing:
            if len(self._memory) < size:
                self._memory = _page_aligned(size, pinned=pinned)
                if touched:
                    self._memory[:: mmap.PAGESIZE].zero_()
            return self._memory[:size]


def _on_gpu(tensors: Mapping[Spec, Tensor]) -> bool:
    return any(value.is_cuda for value in tensors.values())


def _page_aligned(size: int, *, pinned: bool) -> Tensor:
    """Return memory that can be written to disk past the page cache."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
