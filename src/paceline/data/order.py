"""Which sample is the k-th of an epoch: a pure function of (seed, epoch, k), O(1) to start anywhere.

A keyed permutation of [0, size) and not a stored one: a Feistel network over the next power of two,
walked along its cycle until it lands inside (under two rounds of walking on average).
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

Places = NDArray[numpy.int64]
_Words = NDArray[numpy.uint64]

_ROUNDS = 8
_MIX_1 = numpy.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = numpy.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2 = numpy.uint64(30), numpy.uint64(27)


def samples_at(places: Places, size: int, seed: int, epoch: int) -> Places:
    """Return the sample numbers at some places of an epoch's order.

    >>> sorted(samples_at(numpy.arange(5), size=5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    if size == 1:
        return numpy.zeros_like(places)
    bits = (size - 1).bit_length()
    keys = _round_keys(seed, epoch)
    values = _permute(places.astype(numpy.uint64), bits, keys)
    outside = numpy.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _permute(values[outside], bits, keys)
        outside = outside[values[outside] >= size]
    return values.astype(numpy.int64)


def _round_keys(seed: int, epoch: int) -> _Words:
    start = numpy.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=numpy.uint64)
    state = _mixed(_mixed(start[:1] + numpy.uint64(0x9E3779B97F4A7C15)) + start[1:] * _MIX_2)
    return _mixed(state + numpy.arange(1, _ROUNDS + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15))


def _permute(values: _Words, bits: int, keys: _Words) -> _Words:
    """Permute [0, 2**bits): each round changes one half by a function of the other, then swaps the halves."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = values >> numpy.uint64(low_bits), values & numpy.uint64((1 << low_bits) - 1)
    for key in keys:
        high, low = low, high ^ (_mixed(low ^ key) & numpy.uint64((1 << high_bits) - 1))
        high_bits, low_bits = low_bits, high_bits
    return (high << numpy.uint64(low_bits)) | low


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> _SHIFT_1)) * _MIX_1
    words = (words ^ (words >> _SHIFT_2)) * _MIX_2
    return words ^ (words >> numpy.uint64(31))
