"""Random numbers per sample: a pure function of (seed, epoch, sample)."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.order import Places, mixed
from paceline.errors import ConfigError
from paceline.world.randomness import mix

_STRIDE = numpy.uint64(0x9E3779B97F4A7C15)
_FLOAT_BITS = 24
_FLOAT_SCALE = numpy.float32(2.0**-_FLOAT_BITS)


class SampleRng:
    """Random numbers for the samples of a lane; every call returns new ones."""

    def __init__(self, samples: Places, key: tuple[int, int], device: str = "cpu") -> None:
        self._samples, self._device = samples.astype(numpy.uint64), device
        self._key, self._calls = key, 0

    def uniform(self, count: int = 1) -> Tensor:
        """Return `count` numbers from [0, 1) per sample, as [samples, count].

        >>> samples = numpy.array([3, 7])
        >>> both, one = SampleRng(samples, (1, 0)).uniform(2), SampleRng(samples[1:], (1, 0)).uniform(2)
        >>> bool((both[1] == one[0]).all())
        True
        """
        bits = self._random_bits(count) >> numpy.uint64(64 - _FLOAT_BITS)
        return torch.from_numpy(bits.astype(numpy.float32) * _FLOAT_SCALE).to(self._device)

    def integers(self, low: int, high: int, count: int = 1) -> Tensor:
        """Return `count` integers from [low, high) per sample, as [samples, count]."""
        if not 0 < high - low <= 1 << 32:
            raise ConfigError(
                f"integers({low}, {high}): the range must have 1 to 2**32 values, got {high - low}",
                fix="pass low < high, at most 2**32 apart",
            )
        bits = self._random_bits(count) >> numpy.uint64(32)
        scaled = (bits * numpy.uint64(high - low)) >> numpy.uint64(32)
        return torch.from_numpy(scaled.astype(numpy.int64) + low).to(self._device)

    def _random_bits(self, count: int) -> NDArray[numpy.uint64]:
        self._calls += 1
        key = numpy.uint64(mix(*self._key, self._calls))
        starts = mixed(self._samples * _STRIDE ^ key)
        return mixed(starts[:, None] + numpy.arange(count, dtype=numpy.uint64) * _STRIDE)
