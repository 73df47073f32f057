"""Sources of samples: tensors in memory, or any map-style dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from paceline.data.order import Places
from paceline.data.reading.batch_buffer import BatchBuffer
from paceline.errors import ConfigError
from paceline.world.randomness import seed_everything

Batch = tuple[Tensor, ...]


class Source(Protocol):
    """Numbered samples that are read many at a time."""

    bytes_per_sample: int
    """Host memory that one prefetched sample takes."""
    block: int
    """Consecutive samples that are stored and read together; 0: samples are separate."""
    window: int
    """Blocks that are shuffled together. Samples of at most two windows are requested at a time."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return samples, stacked. `key` is (seed, epoch), for sources that draw random numbers."""


@runtime_checkable
class SupportsGatherInto(Source, Protocol):
    """A source that can fill a buffer of the caller."""

    def new_buffer(self, count: int, *, pinned: bool = False) -> BatchBuffer:
        """Allocate a buffer for `count` samples."""

    def gather_into(self, samples: Places, buffer: BatchBuffer) -> Batch:
        """Copy samples into a buffer that is large enough; return the part that was filled."""


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A source that can fetch blocks before they are needed."""

    def expect(self, blocks: Sequence[int]) -> None:
        """Start to fetch the blocks of the next window."""


class TensorSource:
    """Samples that are rows of tensors; the last tensor is the target."""

    block = window = 0

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise ConfigError(
                f"all tensors of a dataset must have the same number of rows, got {lengths}",
                fix="pass tensors of equal length",
            )
        self._tensors = tensors
        row_sizes = [tensor[:1].numel() * tensor.element_size() for tensor in tensors]
        self.bytes_per_sample = sum(row_sizes)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return rows of every tensor."""
        rows = torch.from_numpy(samples)
        return tuple(tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors)


class DatasetWrapper:
    """A wrapper with as many samples as its dataset, in the same blocks."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.block: int = getattr(dataset, "block", 0)

    @property
    def window(self) -> int:
        """Blocks that are shuffled together; the dataset may size its cache by it."""
        return getattr(self._dataset, "window", 0)

    @window.setter
    def window(self, blocks: int) -> None:
        if hasattr(self._dataset, "window"):
            self._dataset.window = blocks

    def __len__(self) -> int:
        return len(self._dataset)


class DatasetSource(DatasetWrapper):
    """Samples of a map-style dataset, read one by one.

    All generators are seeded by sample first.
    """

    bytes_per_sample = 1 << 30  # unknown: group no steps

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return samples, stacked by `default_collate`."""
        batch = default_collate([self._sample(int(sample), key) for sample in samples])
        if isinstance(batch, Mapping):
            raise ConfigError(
                f"samples of the dataset are mappings with the keys {', '.join(map(str, batch))}",
                fix="return a tuple from __getitem__, with the target last",
            )
        return tuple(batch) if isinstance(batch, Sequence) else (batch,)

    def _sample(self, sample: int, key: tuple[int, int]) -> Any:
        seed_everything(*key, sample)
        return self._dataset[sample]


def as_source(data: Any) -> Source:
    """Turn a source, tensors, or anything with `__len__` and `__getitem__` into a source."""
    source = _find_source(data)
    if len(source) == 0:
        raise ConfigError(
            "the dataset has 0 samples", fix="check the path or the filter that made it"
        )
    return source


def _find_source(data: Any) -> Source:
    if hasattr(data, "gather"):
        _check_source(data)
        source: Source = data
        return source
    if isinstance(data, TensorDataset):
        return TensorSource(*data.tensors)
    if isinstance(data, tuple | list) and all(isinstance(item, Tensor) for item in data):
        return TensorSource(*data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data)
    raise ConfigError(
        f"{type(data).__name__} is not a map-style dataset",
        fix="pass a tuple of tensors, or a dataset with __len__ and __getitem__",
    )


def _check_source(data: Any) -> None:
    required = ("bytes_per_sample", "block", "window", "__len__")
    missing = [name for name in required if not hasattr(data, name)]
    if missing:
        raise ConfigError(
            f"{type(data).__name__} has gather, but not {', '.join(missing)}",
            fix="add the attributes of paceline.data.reading.source.Source (block = window = 0 if samples "
            "are stored separately)",
        )
