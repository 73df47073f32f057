"""What is done to samples on their way: to a whole lane at once, or to one sample after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.data.order import Places
from paceline.data.reading.sample_rng import SampleRng
from paceline.data.reading.source import Batch, DatasetWrapper, Source
from paceline.errors import ConfigError
from paceline.world.randomness import seed_everything

Transform = Callable[[Batch, SampleRng], Batch]
"""transform(batch, draws) -> batch: many samples at once; what is random comes from `draws`, which are keyed by sample."""


class Transformed:
    """A source whose lanes are transformed as a whole, on the device of the training."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source, self._transform = source, transform
        self.bytes_per_sample, self.block, self.window = (
            source.bytes_per_sample,
            source.block,
            source.window,
        )

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return some samples, transformed."""
        return self.apply(self.source.gather(samples, key), samples, key)

    def apply(self, batch: Batch, samples: Places, key: tuple[int, int]) -> Batch:
        """Transform samples that were read."""
        seed_everything(
            *key, int(samples[0])
        )  # for those who draw elsewhere: the same in every world, at least
        found = self._transform(batch, SampleRng(samples, key, str(batch[0].device)))
        if isinstance(found, Tensor):
            raise ConfigError(
                "the transform returned a tensor, not a batch", fix="return a tuple of tensors"
            )
        return tuple(found)


class PerSample(DatasetWrapper):
    """A dataset whose samples are transformed one by one, in the workers if there are any."""

    def __init__(self, dataset: Any, transform: Callable[..., Any]) -> None:
        super().__init__(dataset)
        self._transform = transform

    def __getitem__(self, sample: int) -> Any:
        return self._transform(*self._dataset[sample])
