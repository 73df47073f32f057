"""A set that is small enough to lie on the GPU as a whole: its batches are gathered there."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from paceline.data.order import Places
from paceline.data.reading.source import Batch, Source, SupportsGatherInto, TensorSource

_PIECE_BYTES = 1 << 26
_SHARE = 0.25  # of the memory that is free on the GPU: the rest is the training's


class Resident:
    """All samples of a source, on the device."""

    block = window = 0

    def __init__(self, source: Source, device: str) -> None:
        self.bytes_per_sample, self._samples = source.bytes_per_sample, len(source)
        each = max(1, _PIECE_BYTES // max(1, source.bytes_per_sample))
        begins = range(0, self._samples, each)
        pieces = [
            source.gather(numpy.arange(begin, min(begin + each, self._samples)), (0, 0))
            for begin in begins
        ]
        self._tensors = tuple(
            torch.cat([part.to(device) for part in parts]) for parts in zip(*pieces, strict=True)
        )

    def __len__(self) -> int:
        return self._samples

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return rows of every tensor; the numbers of the rows are all that travels."""
        rows = torch.from_numpy(samples)
        if self._tensors[0].is_cuda:
            rows = rows.pin_memory()
        rows = rows.to(self._tensors[0].device, non_blocking=True)
        return tuple(tensor.index_select(0, rows) for tensor in self._tensors)


def cache_on_gpu(source: Source, device: str, most_gb: float) -> Source:
    """Return a source on the device, if it gives the same samples every time and fits; else the source as it is."""
    size = source.bytes_per_sample * len(source)
    plain = isinstance(source, TensorSource | SupportsGatherInto)
    if device == "cpu" or not plain or size > most_gb * 1e9 or not fits(size, device):
        return source
    return Resident(source, device)


def fits(size_bytes: int, device: str) -> bool:
    """Return whether so many bytes leave the training enough memory."""
    free, _ = torch.cuda.mem_get_info(device)
    return size_bytes <= _SHARE * free


def copy_to_device(stream: torch.cuda.Stream | None, batch: Batch, device: str) -> Batch:
    """Copy a batch to the device while it computes; what is launched from now on waits for the copy."""
    if stream is None:
        return tuple(tensor.to(device) for tensor in batch)
    with torch.cuda.stream(stream):
        found: tuple[Tensor, ...] = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
    now = torch.cuda.current_stream(torch.device(device))
    now.wait_stream(stream)
    for tensor in found:
        tensor.record_stream(now)
    return found
