"""What a torch DataLoader says about its data: dataset, collate_fn, sampler, workers, batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from paceline.config import RunConfig
from paceline.config.given import is_given, with_values
from paceline.data.order import Places
from paceline.data.reading.collate import Collate
from paceline.data.sampling import (
    EpochOrder,
    RepeatedOrder,
    SampleOrder,
    SequentialOrder,
    SubsetOrder,
    UniformOrder,
    WeightedOnceOrder,
    WeightedOrder,
)
from paceline.errors import ConfigError
from paceline.world.randomness import mix, seed_everything

_KEYED = "{name} is keyed by the seed"


class IteratedOrder(EpochOrder):
    """The samples of a sampler object, which is iterated once per epoch.

    All generators are seeded from (seed, epoch) first, and its own, if it has one.
    """

    repeats = True  # unknown

    def __init__(self, sampler: Any, samples: int) -> None:
        if not hasattr(sampler, "__len__"):
            raise ConfigError(
                f"{type(sampler).__name__} has no __len__, so the length of an epoch is unknown",
                fix="give the sampler a __len__, or pass paceline.Stream instead of a DataLoader",
            )
        super().__init__(len(sampler))
        self._sampler, self._samples = sampler, samples
        self._is_repeatable = False

    def epoch(self, seed: int, epoch: int) -> Places:
        """Iterate the sampler; the first time twice, because a resumed run draws epochs again."""
        found = self._draw(seed, epoch)
        if not self._is_repeatable and not numpy.array_equal(found, self._draw(seed, epoch)):
            raise ConfigError(
                f"{type(self._sampler).__name__} gave other samples when epoch {epoch} was drawn again",
                fix="make the sampler draw from torch's default generator, or from a "
                "torch.Generator in its attribute `generator`",
            )
        self._is_repeatable = True
        return found

    def _draw(self, seed: int, epoch: int) -> Places:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        seed_everything(seed, epoch)
        generator = getattr(self._sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(mix(seed, epoch))
        return self._checked(list(self._sampler), epoch)

    def _checked(self, found: list[Any], epoch: int) -> Places:
        name = type(self._sampler).__name__
        if len(found) != self.size:
            raise ConfigError(
                f"{name} gave {len(found)} samples in epoch {epoch}, but its length is {self.size}",
                fix="make the sampler give the same number of samples in every epoch",
            )
        array = numpy.asarray(found)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ConfigError(
                f"{name} must give sample numbers, got {found[0]!r}",
                fix="make the sampler yield one int per sample",
            )
        if array.min() < 0 or array.max() >= self._samples:
            raise ConfigError(
                f"{name} gave the sample numbers {array.min()} to {array.max()}, "
                f"but the dataset has {self._samples} samples",
                fix=f"make the sampler yield numbers from 0 to {self._samples - 1}",
            )
        return array.astype(numpy.int64)


@dataclass(frozen=True)
class LoaderSettings:
    """What is taken from a DataLoader. Its other settings do not apply."""

    dataset: Any
    collate: Collate | None
    """Its collate_fn; None: the default."""
    worker_init: Callable[[int], None] | None
    workers: int
    batch_size: int
    """Samples per step over all ranks."""
    drop_last: bool
    order: SampleOrder | None
    """The order of its sampler; None: the shuffle of Paceline."""
    sampler: str
    """What becomes of the sampler, for people."""

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderSettings:
        """Read the settings of a DataLoader, or raise ConfigError if it cannot be taken over."""
        _check_loader(loader)
        order, sampler = order_of(loader.sampler, len(loader.dataset))  # type: ignore[arg-type]
        assert loader.batch_size is not None  # checked
        return cls(
            dataset=loader.dataset,
            collate=None if loader.collate_fn is default_collate else loader.collate_fn,
            worker_init=loader.worker_init_fn,
            workers=loader.num_workers,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            order=order,
            sampler=sampler,
        )

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config with this batch size and these workers, unless settings say otherwise."""
        batch, read = config.batch, config.read
        if not is_given(config, "batch.global_size"):
            batch = replace(batch, global_size=self.batch_size)
        if not is_given(config, "read.workers"):
            read = replace(read, workers=self.workers)
        return with_values(config, batch=batch, read=read)

    def description(self, config: RunConfig, collate: Collate | None = None) -> str:
        """Return one line about what became of each setting, for a config that was applied."""
        size = f"batch_size={self.batch_size} is the global batch"
        if config.batch.global_size != self.batch_size:
            size = f"batch.global_size={config.batch.global_size} replaces batch_size={self.batch_size}"
        kept = "default collate_fn" if self.collate is None else "collate_fn kept"
        parts = [size, self.sampler, _workers(config.read.workers)]
        parts.append("collate= replaces collate_fn" if collate is not None else kept)
        if self.drop_last:
            parts.append("drop_last leaves out the short last step of an epoch")
        return "DataLoader: " + ", ".join(parts)


def order_of(sampler: Any, samples: int) -> tuple[SampleOrder | None, str]:
    """Return the order of a sampler and what becomes of it; None: the shuffle of Paceline."""
    name = type(sampler).__name__
    keyed = _KEYED.format(name=name)
    if type(sampler) is SequentialSampler:
        return SequentialOrder(samples), f"{name} keeps the stored order"
    if type(sampler) is RandomSampler:
        return _random_order(sampler, samples), keyed
    if type(sampler) is WeightedRandomSampler:
        kind = WeightedOrder if sampler.replacement else WeightedOnceOrder
        _check_weight_count(len(sampler.weights), samples)
        return kind(sampler.weights, sampler.num_samples), keyed
    if type(sampler) is SubsetRandomSampler:
        return SubsetOrder(sampler.indices), keyed
    if isinstance(sampler, DistributedSampler):  # would share out what lanes share out already
        order = None if sampler.shuffle else SequentialOrder(samples)
        return order, f"{name} is not needed: lanes share out the samples"
    return IteratedOrder(sampler, samples), f"{name} is iterated once per epoch, seeded by epoch"


def _random_order(sampler: RandomSampler, samples: int) -> SampleOrder | None:
    if sampler.replacement:
        return UniformOrder(samples, sampler.num_samples)
    if sampler.num_samples != samples:
        return RepeatedOrder(samples, sampler.num_samples)
    return None


def _check_weight_count(weights: int, samples: int) -> None:
    if weights > samples:
        raise ConfigError(
            f"there are {weights} weights for {samples} samples", fix="pass one weight per sample"
        )


def _check_loader(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an IterableDataset: its samples have no numbers",
            fix="pass paceline.Stream(factory), where factory(shard, shards) returns the samples of one lane",
        )
    if not hasattr(loader.dataset, "__len__"):
        raise ConfigError(
            f"{type(loader.dataset).__name__} has no __len__",
            fix="give the dataset a __len__, or pass paceline.Stream instead of a DataLoader",
        )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"the DataLoader has a batch_sampler of its own, {type(loader.batch_sampler).__name__}",
            fix="for batches of similar length pass paceline.by_length(dataset, lengths, batch=config.batch.global_size) to run.steps; "
            "else pass batch_size= and sampler= to the DataLoader instead of batch_sampler=",
        )
    if loader.batch_size is None:
        raise ConfigError(
            "the DataLoader has no batch_size",
            fix="pass batch_size= to it: the global batch. Instead of a batch_sampler of similar lengths pass "
            "paceline.by_length(dataset, lengths, batch=config.batch.global_size) to run.steps",
        )


def _workers(count: int) -> str:
    if not count:
        return "no workers"
    return f"{count} worker{'s' if count > 1 else ''}"
