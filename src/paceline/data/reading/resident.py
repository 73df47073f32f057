"""Datasets small enough to stay in GPU memory: batches are gathered on the GPU."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from paceline.data.order import Places
from paceline.data.reading.nest import leaves_of, to_device
from paceline.data.reading.source import Batch, Source, SupportsGatherInto, TensorSource

_PIECE_BYTES = 1 << 26
_SHARE = 0.25  # of the free GPU memory; the training needs the rest


class ResidentSource:
    """All samples of a source, in GPU memory."""

    block = window = 0

    def __init__(self, source: Source, device: str) -> None:
        self.bytes_per_sample, self._samples = source.bytes_per_sample, len(source)
        count = max(1, _PIECE_BYTES // max(1, source.bytes_per_sample))
        pieces: list[Batch] = []
        for begin in range(0, self._samples, count):
            samples = numpy.arange(begin, min(begin + count, self._samples))
            pieces.append(source.gather(samples, (0, 0)))
        self._tensors = tuple(
            torch.cat([part.to(device) for part in parts]) for parts in zip(*pieces, strict=True)
        )

    def __len__(self) -> int:
        return self._samples

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return rows of every tensor; only the row numbers are copied to the GPU."""
        rows = torch.from_numpy(samples)
        if self._tensors[0].is_cuda:
            rows = rows.pin_memory()
        rows = rows.to(self._tensors[0].device, non_blocking=True)
        return tuple(tensor.index_select(0, rows) for tensor in self._tensors)


def cache_on_gpu(source: Source, device: str, most_gb: float) -> Source:
    """Copy a source to GPU memory if it is constant and small enough."""
    size = source.bytes_per_sample * len(source)
    constant = isinstance(source, TensorSource | SupportsGatherInto)
    if device == "cpu" or not constant or size > most_gb * 1e9 or not fits(size, device):
        return source
    return ResidentSource(source, device)


def fits(size_bytes: int, device: str) -> bool:
    """Whether this many bytes leave the training enough GPU memory."""
    free, _ = torch.cuda.mem_get_info(device)
    return size_bytes <= _SHARE * free


def copy_to_device(stream: torch.cuda.Stream | None, batch: Batch, device: str) -> Batch:
    """Copy a batch: on `stream`, while the device computes.

    Work launched from now on waits for the copy.
    """
    if device == "cpu":
        return batch
    if stream is None:
        return to_device(batch, device)
    with torch.cuda.stream(stream):
        copies = to_device(batch, device, non_blocking=True)
    current = torch.cuda.current_stream(torch.device(device))
    current.wait_stream(stream)
    for leaf in leaves_of(copies):
        if isinstance(leaf, Tensor):
            leaf.record_stream(current)
    return copies
