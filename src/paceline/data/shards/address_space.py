"""Map many files into one range of addresses, so that one gather reads from all of them.

Files are placed so that the items of every column begin at multiples of their size. All
columns of all files are then rows of one matrix each, which the fastest gather can read.

The mmap module cannot place a file at an address, so this calls mmap of the C library. What it is worth: a random batch
of 128 samples of 784 bytes from 100 files takes 0.06 ms; file by file, with numpy's memmap, 1.3 ms, which is
three times a whole training step of MNIST on an H200. With batches of 4,096 it is three times as fast.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray

_FIXED = 0x10  # MAP_FIXED, the same on Linux and macOS; the mmap module does not name it
_UNBACKED = getattr(mmap, "MAP_NORESERVE", 0)
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value

_LONGEST_PERIOD = 1 << 32
_MOST_ADDRESSES = 1 << 45  # a quarter of the address space of a process


class Region:
    """A reserved range of addresses into which files are mapped read-only."""

    def __init__(self, size: int) -> None:
        self._size = whole_pages(max(1, size))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNBACKED
        self._begin = _map(None, self._size, _NO_ACCESS, flags, -1)
        raw = (ctypes.c_uint8 * self._size).from_address(self._begin)
        self.bytes: NDArray[numpy.uint8] = numpy.ctypeslib.as_array(raw)
        """The whole range. Access to a part that is not mapped crashes the process."""
        # Not at interpreter exit: a thread may still be reading.
        weakref.finalize(raw, _libc().munmap, self._begin, self._size).atexit = False

    def put(self, at: int, descriptor: int, size: int) -> None:
        """Map `size` bytes of a file to an offset, which must be a multiple of the page size."""
        _map(self._begin + at, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, descriptor)

    def take_out(self, at: int, size: int) -> None:
        """Unmap the file at an offset; the addresses stay reserved."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNBACKED | _FIXED
        _map(self._begin + at, whole_pages(size), _NO_ACCESS, flags, -1)


def whole_pages(size: int) -> int:
    """Return a size rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(begin: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    address: int | None = _libc().mmap(begin, size, protection, flags, descriptor, 0)
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def period_of(sizes: Iterable[int], lengths: Iterable[int]) -> int | None:
    """Return the bytes after which a page and items of all sizes begin together again.

    Each file takes whole periods, and one more. None if files of these lengths would take
    too many addresses.

    >>> period_of([784, 8], [1_000_000]) == math.lcm(mmap.PAGESIZE, 784), period_of([4_194_301], [1_000_000])
    (True, None)
    """
    period = math.lcm(mmap.PAGESIZE, *(size for size in sizes if size))
    if period > _LONGEST_PERIOD:
        return None
    periods = sum(-(-length // period) + 1 for length in lengths)
    return period if periods * period <= _MOST_ADDRESSES else None


@lru_cache(maxsize=64)
def shift_of(columns: tuple[tuple[int, int], ...], period: int) -> int | None:
    """Return the distance from the start of a period that aligns all columns of a file.

    A column is given as (offset in the file, size of its items). None if no shift aligns
    all columns.

    >>> shift = shift_of(((4096, 784), (4096 + 784 * 3, 8)), math.lcm(mmap.PAGESIZE, 784))
    >>> (shift + 4096) % 784, (shift + 4096 + 784 * 3) % 8
    (0, 0)
    """
    shift, step = 0, mmap.PAGESIZE
    for begin, size in columns:
        for _ in range(size // math.gcd(step, size)):
            if (shift + begin) % size == 0:
                break
            shift += step
        else:
            return None
        step = math.lcm(step, size)
    return shift if shift < period else None
