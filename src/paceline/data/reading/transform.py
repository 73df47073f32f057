"""Transforms of samples: of a whole lane at once on the device, or of one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.data.order import Places
from paceline.data.reading.collate import Collate
from paceline.data.reading.nest import device_of
from paceline.data.reading.sample_rng import SampleRng
from paceline.data.reading.source import Batch, DatasetWrapper, Source, as_source, gather_lane
from paceline.errors import ConfigError
from paceline.world.randomness import seed_everything

Transform = Callable[[Batch, SampleRng], Batch]
"""transform(batch, rng) -> batch, for many samples at once.

Draw random numbers from `rng`, which is keyed by sample.
"""


class Transformed:
    """A source whose lanes are transformed as a whole, on the device of the training."""

    per_lane = True

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source, self._transform = source, transform
        self.bytes_per_sample = source.bytes_per_sample
        self.block, self.window = source.block, source.window

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, samples: Places, key: tuple[int, int], draws: Places | None = None) -> Batch:
        """Read the samples of a lane and transform them."""
        batch = gather_lane(self.source, samples, key, draws)
        return self.apply(batch, samples if draws is None else draws, key)

    def apply(self, batch: Batch, samples: Places, key: tuple[int, int]) -> Batch:
        """Transform samples that were read; `samples` key the random numbers."""
        # For transforms that use global generators: at least the same at every world size.
        seed_everything(*key, int(samples[0]))
        result = self._transform(batch, SampleRng(samples, key, device_of(batch)))
        if isinstance(result, Tensor) and not isinstance(batch, Tensor):
            raise ConfigError(
                "the transform returned a tensor instead of a batch",
                fix="return a tuple of tensors, or the nest that the batch was",
            )
        return tuple(result) if isinstance(result, list) else result


def transformed(
    dataset: Any, transform: Transform, *, collate: Collate | None = None
) -> Transformed:
    """Apply a function to the batch of each lane, on the device of the training: to augment images on a GPU, for example.

    - `dataset`: tensors, or a map-style dataset.
    - `transform`: `transform(batch, rng)` returns the batch. Draw random numbers from `rng`: they are keyed by sample, so
      the result is the same on any number of ranks.
    - `collate`: makes the batch that is transformed; as for `run.steps`.

    >>> def noisy(batch, rng):
    ...     return (batch[0] + 0.1 * rng.uniform(4),)
    >>> len(paceline.transformed((torch.zeros(8, 4),), noisy))
    8
    """
    return Transformed(as_source(dataset, collate), transform)


class PerSample(DatasetWrapper):
    """A dataset whose samples are transformed one by one, in the workers if there are any."""

    def __init__(self, dataset: Any, transform: Callable[..., Any]) -> None:
        super().__init__(dataset)
        self._transform = transform

    def __getitem__(self, sample: int) -> Any:
        return self._transform(*self.dataset[sample])
