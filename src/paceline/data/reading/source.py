"""What samples come from: tensors in memory, or any map-style dataset."""

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
    """What reading one ahead costs in memory."""
    block: int
    """How many samples in a row lie, and are read, together; 0: each by itself."""
    window: int
    """How many blocks are mixed: no more than two windows are asked for at a time."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return some samples, stacked; `key` is (seed, epoch), for sources that draw random numbers."""


@runtime_checkable
class SupportsGatherInto(Source, Protocol):
    """A source that can fill memory which is used again."""

    def new_buffer(self, count: int, *, pinned: bool = False) -> BatchBuffer:
        """Return memory for so many samples."""

    def gather_into(self, samples: Places, room: BatchBuffer) -> Batch:
        """Copy some samples into memory that has room for at least as many; return the part that was filled."""


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A source that makes use of knowing what comes next."""

    def expect(self, blocks: Sequence[int]) -> None:
        """Get ready for the blocks of the next window."""


class TensorSource:
    """Samples that are rows of tensors, the last of which is the target."""

    block = window = 0

    def __init__(self, *tensors: Tensor) -> None:
        if not tensors or any(len(tensor) != len(tensors[0]) for tensor in tensors):
            raise ConfigError(
                f"tensors of {[len(tensor) for tensor in tensors]} rows are not one set of samples",
                fix="give tensors of equal length",
            )
        self._tensors = tensors
        self.bytes_per_sample = sum(
            tensor[:1].numel() * tensor.element_size() for tensor in tensors
        )

    def __len__(self) -> int:
        return len(self._tensors[0])

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return rows of every tensor."""
        rows = torch.from_numpy(samples)
        return tuple(tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors)


class DatasetWrapper:
    """What lies around a dataset, and has as many samples in the same blocks."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.block: int = getattr(dataset, "block", 0)

    @property
    def window(self) -> int:
        """How many blocks are mixed; the dataset may read the better for knowing it."""
        return getattr(self._dataset, "window", 0)

    @window.setter
    def window(self, blocks: int) -> None:
        if hasattr(self._dataset, "window"):
            self._dataset.window = blocks

    def __len__(self) -> int:
        return len(self._dataset)


class DatasetSource(DatasetWrapper):
    """Samples of a map-style dataset, read one by one; what it draws at random is keyed by the sample."""

    bytes_per_sample = 1 << 30  # unknown: read no step ahead

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return samples as the default collation stacks them."""
        found = default_collate([self._sample(int(sample), key) for sample in samples])
        if isinstance(found, Mapping):
            raise ConfigError(
                f"a sample of the dataset is a mapping of {', '.join(map(str, found))}",
                fix="return a tuple, the target last, or give Trainer a dataset that does",
            )
        return tuple(found) if isinstance(found, Sequence) else (found,)

    def _sample(self, sample: int, key: tuple[int, int]) -> Any:
        seed_everything(*key, sample)
        return self._dataset[sample]


def as_source(data: Any) -> Source:
    """Return a source for what the user has: a source, tensors, or anything with a length and an index."""
    if hasattr(data, "gather"):
        missing = [
            name
            for name in ("bytes_per_sample", "block", "window", "__len__")
            if not hasattr(data, name)
        ]
        if missing:
            raise ConfigError(
                f"{type(data).__name__} has gather, but no {', '.join(missing)}",
                fix="give it what paceline.data.reading.source.Source describes (block = window = 0: samples lie anywhere)",
            )
        found: Source = data
    elif isinstance(data, TensorDataset):
        found = TensorSource(*data.tensors)
    elif isinstance(data, tuple | list) and all(isinstance(item, Tensor) for item in data):
        found = TensorSource(*data)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        found = DatasetSource(data)
    else:
        raise ConfigError(
            f"{type(data).__name__} is not a set of numbered samples",
            fix="give a tuple of tensors, or a dataset with __len__ and __getitem__",
        )
    if len(found) == 0:
        raise ConfigError(
            "the dataset has 0 samples", fix="check the path or the filter that made it"
        )
    return found
