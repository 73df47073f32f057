"""Where a file waits in host memory until it is written: laid out as it will be on disk."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from paceline.tensorfile import Spec, plan_file

WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's own word for a type."""

DTYPES = {word: dtype for dtype, word in WORDS.items()}


class Staging:
    """Page-aligned memory, pinned for a GPU, that is kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._growing = threading.Lock()

    def prepare(self, mine: Mapping[Spec, Tensor]) -> None:
        """Make room for a file of these tensors, and touch every page of it."""
        if mine:
            self._room(plan_file(mine).size_bytes, pinned=_on_gpu(mine), touched=True)

    def fill(
        self, mine: Mapping[Spec, Tensor], all_of_them: Iterable[tuple[Spec, Tensor]]
    ) -> memoryview | None:
        """Copy my tensors to where they will lie in the file, each as it comes, and return the file."""
        image = plan_file(mine)
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
