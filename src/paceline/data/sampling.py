"""Orders besides the shuffle: sequential, weighted, subsets, mixtures; keyed by (seed, epoch, k)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from paceline.data.order import Places, mixed, samples_at
from paceline.errors import ConfigError

Weights = NDArray[numpy.float64]

_STRIDE = numpy.uint64(0x9E3779B97F4A7C15)
_EPOCH_STRIDE = numpy.uint64(0xD1B54A32D192ED03)
_LATER_PASS = 1 << 40  # permutations beyond those of `Order`


class SampleOrder(Protocol):
    """Which sample is the k-th of an epoch: a pure function of (seed, epoch, k)."""

    @property
    def size(self) -> int:
        """Samples per epoch."""

    @property
    def repeats(self) -> bool:
        """Whether an epoch may contain a sample more than once."""

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Return the samples at these places of an epoch's order."""

    def next_blocks(self, place: int, seed: int, epoch: int) -> list[int]:
        """Return the blocks to prefetch."""


class _UnblockedOrder:
    """An order that does not follow the blocks of a dataset."""

    repeats = False

    def __init__(self, size: int) -> None:
        self.size = size

    def next_blocks(self, place: int, seed: int, epoch: int) -> list[int]:
        """Return nothing: no block is known in advance."""
        return []


class SequentialOrder(_UnblockedOrder):
    """The samples as they are stored, in every epoch."""

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Return the places themselves."""
        return places


class SubsetOrder(_UnblockedOrder):
    """Some of the samples, shuffled in every epoch."""

    def __init__(self, samples: Sequence[int]) -> None:
        super().__init__(len(samples))
        self._samples = numpy.asarray(samples, dtype=numpy.int64)

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Return the chosen samples at these places of their permutation."""
        return self._samples[samples_at(places, self.size, seed, epoch)]


class RepeatedOrder(_UnblockedOrder):
    """Permutations of all samples, one after the other; the last one may be cut."""

    def __init__(self, samples: int, size: int) -> None:
        super().__init__(size)
        self._samples, self.repeats = samples, size > samples

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Return the samples at these places of the permutations."""
        return _in_passes(places, self._samples, seed, epoch, part=0)


class UniformOrder(_UnblockedOrder):
    """Samples drawn with replacement, all equally likely."""

    repeats = True

    def __init__(self, samples: int, size: int) -> None:
        super().__init__(size)
        self._samples = samples

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Return one draw per place."""
        drawn = (uniform_at(places, seed, epoch) * self._samples).astype(numpy.int64)
        return numpy.minimum(drawn, self._samples - 1)


class WeightedOrder(_UnblockedOrder):
    """Samples drawn with replacement, by weight.

    >>> WeightedOrder([0, 1, 0], 4).at(numpy.arange(4), seed=1, epoch=0).tolist()
    [1, 1, 1, 1]
    """

    repeats = True

    def __init__(self, weights: Any, size: int) -> None:
        super().__init__(size)
        checked = check_weights(weights)
        self._ends = numpy.cumsum(checked)
        self._last = int(numpy.flatnonzero(checked)[-1])

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Return one draw per place."""
        return _draw(self._ends, self._last, places, seed, epoch)


class ComposedOrder(_UnblockedOrder):
    """Draws from draws: the outer order chooses places of the inner one."""

    def __init__(self, outer: SampleOrder, inner: SampleOrder) -> None:
        super().__init__(outer.size)
        self._outer, self._inner = outer, inner
        self.repeats = outer.repeats or inner.repeats

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Look up the places of the inner order, then its samples."""
        return self._inner.at(self._outer.at(places, seed, epoch), seed, epoch)


class EpochOrder(_UnblockedOrder, ABC):
    """An order that is computed for an epoch as a whole."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._epochs: dict[tuple[int, int], Places] = {}

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Look up the samples of these places."""
        key = seed, epoch
        if key not in self._epochs:
            if len(self._epochs) > 1:  # two: readers may be one epoch ahead
                del self._epochs[next(iter(self._epochs))]
            self._epochs[key] = self.epoch(seed, epoch)
        return self._epochs[key][places]

    @abstractmethod
    def epoch(self, seed: int, epoch: int) -> Places:
        """Return all samples of an epoch in order."""


class WeightedOnceOrder(EpochOrder):
    """Samples drawn by weight, each at most once per epoch."""

    def __init__(self, weights: Any, size: int) -> None:
        super().__init__(size)
        self._weights = check_weights(weights)
        possible = int(numpy.count_nonzero(self._weights))
        if size > possible:
            raise ConfigError(
                f"{size} samples cannot be drawn without replacement from {possible} with a weight above 0",
                fix=f"set the number of samples to {possible} or less, or replacement=True",
            )

    def epoch(self, seed: int, epoch: int) -> Places:
        """Return the samples in the order of exponential waiting times with these rates."""
        uniform = uniform_at(numpy.arange(len(self._weights)), seed, epoch)
        with numpy.errstate(divide="ignore", invalid="ignore"):
            times = -numpy.log1p(-uniform) / self._weights
        times[self._weights == 0] = numpy.inf
        return numpy.argsort(times, kind="stable")[: self.size]


class MixtureOrder(EpochOrder):
    """Samples of several datasets, one after the other: draw a dataset, take its next sample.

    A dataset's samples come in the order of its own permutation; after the last one it starts
    a new permutation.
    """

    def __init__(self, sizes: Sequence[int], weights: Any, size: int) -> None:
        super().__init__(size)
        self.repeats = True
        self._sizes = list(sizes)
        checked = check_weights(weights)
        self._ends = numpy.cumsum(checked)
        self._last = int(numpy.flatnonzero(checked)[-1])

    def epoch(self, seed: int, epoch: int) -> Places:
        """Return all samples of an epoch as numbers of the joined datasets."""
        chosen = _draw(self._ends, self._last, numpy.arange(self.size), seed, epoch)
        samples = numpy.empty(self.size, dtype=numpy.int64)
        begin = 0
        for dataset, size in enumerate(self._sizes):
            places = numpy.flatnonzero(chosen == dataset)
            part = (dataset + 1) * _LATER_PASS * 2
            taken = _in_passes(numpy.arange(len(places)), size, seed, epoch, part)
            samples[places] = begin + taken
            begin += size
        return samples


class LengthOrder(EpochOrder):
    """Batches of samples of similar length, in random order.

    The shuffled samples are sorted by length within windows of many batches; the batches of a window are shuffled.

    >>> LengthOrder([9, 1, 8, 2], batch=2, window=2).epoch(seed=1, epoch=0).tolist()
    [1, 3, 2, 0]
    """

    def __init__(self, lengths: Any, batch: int, window: int) -> None:
        self._lengths = numpy.asarray(lengths)
        super().__init__(len(self._lengths))
        self.batch, self._window = batch, window

    def epoch(self, seed: int, epoch: int) -> Places:
        """Return all samples of an epoch in order; a short batch is the last one."""
        shuffled = samples_at(numpy.arange(self.size), self.size, seed, epoch)
        whole = self.size - self.size % self.batch
        batches: list[Places] = []
        for begin in range(0, whole, self.batch * self._window):
            window = shuffled[begin : min(begin + self.batch * self._window, whole)]
            ordered = window[numpy.argsort(self._lengths[window], kind="stable")]
            batches += numpy.split(ordered, len(ordered) // self.batch)
        if not batches:
            return shuffled
        order = samples_at(numpy.arange(len(batches)), len(batches), seed, epoch + _LATER_PASS)
        return numpy.concatenate([*(batches[place] for place in order), shuffled[whole:]])


def uniform_at(places: Places, seed: int, epoch: int) -> Weights:
    """Return a number from [0, 1) per place, with 53 random bits.

    >>> both, one = uniform_at(numpy.array([3, 7]), 1, 0), uniform_at(numpy.array([7]), 1, 0)
    >>> bool(both[1] == one[0])
    True
    """
    start = numpy.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=numpy.uint64)
    key = mixed(mixed(start[:1] + _STRIDE) + start[1:] * _EPOCH_STRIDE)
    words = mixed(mixed(places.astype(numpy.uint64) * _STRIDE ^ key) + _STRIDE)
    return (words >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53


def check_weights(weights: Any) -> Weights:
    """Return weights as an array, or raise ConfigError."""
    array = numpy.asarray(weights, dtype=numpy.float64)
    if array.ndim != 1 or not array.size:
        raise ConfigError(
            f"weights must be a list of numbers, got shape {list(array.shape)}",
            fix="pass one weight per sample",
        )
    bad = ~(numpy.isfinite(array) & (array >= 0))
    if bad.any():
        place = int(numpy.flatnonzero(bad)[0])
        raise ConfigError(
            f"weights must be finite and >= 0, got {array[place]} at index {place}",
            fix="replace it by 0, or by the weight that it should have",
        )
    if not array.any():
        raise ConfigError("all weights are 0", fix="give at least one a weight above 0")
    return array


def _draw(ends: Weights, last: int, places: Places, seed: int, epoch: int) -> Places:
    """Return the interval in which each place's random number falls."""
    drawn = numpy.searchsorted(ends, uniform_at(places, seed, epoch) * ends[-1], side="right")
    chosen: Places = numpy.minimum(drawn, last)  # the product may round up to the end
    return chosen


def _in_passes(places: Places, samples: int, seed: int, epoch: int, part: int) -> Places:
    """Return the samples at places of permutations, one after the other."""
    passes, within = numpy.divmod(places, samples)
    found = numpy.empty_like(places)
    for number in numpy.unique(passes).tolist():
        inside = passes == number
        permutation = part + (_LATER_PASS + number if number else 0)
        found[inside] = samples_at(within[inside], samples, seed, epoch, permutation)
    return found
