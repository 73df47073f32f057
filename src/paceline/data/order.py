"""The k-th sample of an epoch: a pure function of (seed, epoch, k), O(1) from any k.

A keyed permutation of [0, size) that is never stored: a Feistel network over the next power of two,
applied again until the value is below size (under two applications on average).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import numpy
from numpy.typing import NDArray

Places = NDArray[numpy.int64]
_Words = NDArray[Any]  # uint32 where that is wide enough, else uint64
_Round = Callable[[_Words], _Words]

_ROUNDS = 8
_TABLED_BITS = 32  # up to here a round is a lookup in a table of half of the bits, 4 x faster
_MIX_1 = numpy.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = numpy.uint64(0x94D049BB133111EB)
_STRIDE = numpy.uint64(0x9E3779B97F4A7C15)
_SHIFT_1, _SHIFT_2 = numpy.uint64(30), numpy.uint64(27)
_WHOLE, _BLOCKS, _FIRST_WINDOW = 0, 1, 2  # the permutations of an epoch


def samples_at(places: Places, size: int, seed: int, epoch: int, part: int = _WHOLE) -> Places:
    """Return the samples at these places of an epoch's order.

    >>> sorted(samples_at(numpy.arange(5), size=5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    return _walk(places, size, _permute, seed, epoch, part)


def places_of(samples: Places, size: int, seed: int, epoch: int, part: int = _WHOLE) -> Places:
    """Return the places of samples in an epoch's order: the inverse of `samples_at`.

    >>> places_of(samples_at(numpy.arange(5), 5, seed=1, epoch=0), 5, seed=1, epoch=0).tolist()
    [0, 1, 2, 3, 4]
    """
    return _walk(samples, size, _permute_back, seed, epoch, part)


@dataclass(frozen=True)
class Order:
    """Permute the blocks of a dataset, then the samples of each window of blocks.

    Only the blocks of one window are needed at a time. A dataset of at most one window is
    shuffled as a whole, in the order of `samples_at`.
    """

    size: int
    block: int
    """Samples per block; the last block may be shorter."""
    window: int
    """Blocks whose samples are shuffled together."""
    repeats: ClassVar[bool] = False
    """An epoch contains every sample once."""

    @cached_property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.size // self.block)

    @property
    def _missing(self) -> int:
        """Samples that the last block lacks."""
        return self.blocks * self.block - self.size

    def at(self, places: Places, seed: int, epoch: int) -> Places:
        """Return the samples at these places of an epoch's order.

        >>> order = Order(size=7, block=2, window=2)
        >>> order.at(numpy.arange(7), seed=1, epoch=0).tolist()
        [2, 3, 6, 0, 5, 4, 1]
        """
        if self.blocks <= self.window or not places.size:
            return samples_at(places, self.size, seed, epoch)
        short = self._short(seed, epoch)
        windows = self._padded(places, short) // (self.block * self.window)
        first, last = int(windows.min()), int(windows.max())
        if first == last:
            return self._in_window(places, first, short, seed, epoch)
        samples = numpy.empty_like(places)
        for window in range(first, last + 1):
            inside = numpy.flatnonzero(windows == window)
            samples[inside] = self._in_window(places[inside], window, short, seed, epoch)
        return samples

    def next_blocks(self, place: int, seed: int, epoch: int) -> list[int]:
        """Return the blocks of the window after the one of a place, in shuffled order.

        Empty after the last window.

        >>> Order(size=7, block=2, window=2).next_blocks(0, seed=1, epoch=0)
        [0, 2]
        """
        if self.blocks <= self.window:
            return []
        short = self._short(seed, epoch)
        window = int(self._padded(numpy.array([place]), short)[0]) // (self.block * self.window) + 1
        positions = numpy.arange(window * self.window, min((window + 1) * self.window, self.blocks))
        blocks: list[int] = samples_at(positions, self.blocks, seed, epoch, _BLOCKS).tolist()
        return blocks

    def _in_window(self, places: Places, window: int, short: int, seed: int, epoch: int) -> Places:
        positions = numpy.arange(window * self.window, min((window + 1) * self.window, self.blocks))
        begin = self._begin(int(positions[0]), short)
        end = self._begin(int(positions[-1]) + 1, short)
        part = _FIRST_WINDOW + window
        shuffled = begin + samples_at(places - begin, end - begin, seed, epoch, part)
        position, row = numpy.divmod(self._padded(shuffled, short), self.block)
        blocks = samples_at(positions, self.blocks, seed, epoch, _BLOCKS)
        samples: Places = blocks[position - positions[0]] * self.block + row
        return samples

    def _short(self, seed: int, epoch: int) -> int:
        """Return the position of the last block, the only one that may be short."""
        return int(places_of(numpy.array([self.blocks - 1]), self.blocks, seed, epoch, _BLOCKS)[0])

    def _begin(self, position: int, short: int) -> int:
        """Return the first place of the block at a position."""
        return position * self.block - (self._missing if position > short else 0)

    def _padded(self, places: Places, short: int) -> Places:
        """Return the places as if no block were short."""
        if not self._missing:
            return places
        return numpy.where(places >= self._begin(short + 1, short), places + self._missing, places)


def _walk(
    values: Places,
    size: int,
    move: Callable[[_Words, int, Sequence[_Round]], _Words],
    seed: int,
    epoch: int,
    part: int,
) -> Places:
    """Apply a permutation of the next power of two until all values are below size."""
    if size == 1:
        return numpy.zeros_like(values)
    bits = (size - 1).bit_length()
    rounds = _rounds(seed, epoch, part, bits)
    dtype = numpy.uint32 if bits <= _TABLED_BITS else numpy.uint64
    moved = move(values.astype(dtype), bits, rounds)
    outside = numpy.flatnonzero(moved >= size)
    while outside.size:
        next_values = move(moved[outside], bits, rounds)
        moved[outside] = next_values
        outside = outside[next_values >= size]
    return moved.astype(numpy.int64)


@lru_cache(maxsize=16)
def _rounds(seed: int, epoch: int, part: int, bits: int) -> list[_Round]:
    """Return the round functions: each maps one half of the bits to a mask for the other."""
    halves = [bits // 2, bits - bits // 2]
    rounds: list[_Round] = []
    for number, key in enumerate(_round_keys(seed, epoch, part)):
        low, high = halves[number % 2], halves[1 - number % 2]
        compute = partial(_round_value, key=key, mask=numpy.uint64((1 << high) - 1))
        if bits <= _TABLED_BITS:
            table = compute(numpy.arange(1 << low, dtype=numpy.uint64)).astype(numpy.uint32)
            rounds.append(partial(_look_up, table))
        else:
            rounds.append(compute)
    return rounds


def _look_up(table: _Words, low: _Words) -> _Words:
    return table.take(low, mode="clip")


def _round_value(low: _Words, key: numpy.uint64, mask: numpy.uint64) -> _Words:
    value: _Words = mixed(low ^ key) & mask
    return value


def _round_keys(seed: int, epoch: int, part: int) -> _Words:
    start = numpy.array([seed & 0xFFFFFFFFFFFFFFFF, epoch, part], dtype=numpy.uint64)
    state = mixed(mixed(start[:1] + _STRIDE) + start[1:2] * _MIX_2)
    if part:
        state = mixed(state ^ (start[2:] * _STRIDE))
    return mixed(state + numpy.arange(1, _ROUNDS + 1, dtype=numpy.uint64) * _STRIDE)


def _permute(values: _Words, bits: int, rounds: Sequence[_Round]) -> _Words:
    """Permute [0, 2**bits): each round XORs a half with a function of the other, and swaps."""
    high, low = _halves(values, bits)
    for value in rounds:
        high, low = low, value(low) ^ high
    return _joined(high, low, bits)


def _permute_back(values: _Words, bits: int, rounds: Sequence[_Round]) -> _Words:
    high, low = _halves(values, bits)
    for value in reversed(rounds):
        high, low = low ^ value(high), high
    return _joined(high, low, bits)


def _halves(values: _Words, bits: int) -> tuple[_Words, _Words]:
    low_bits = values.dtype.type(bits // 2)
    return values >> low_bits, values & values.dtype.type((1 << int(low_bits)) - 1)


def _joined(high: _Words, low: _Words, bits: int) -> _Words:
    joined: _Words = (high << high.dtype.type(bits // 2)) | low
    return joined


def mixed(words: _Words) -> _Words:
    """Return 64-bit words, each hashed (SplitMix64)."""
    words = (words ^ (words >> _SHIFT_1)) * _MIX_1
    words = (words ^ (words >> _SHIFT_2)) * _MIX_2
    hashed: _Words = words ^ (words >> numpy.uint64(31))
    return hashed
