"""One stretch of address space in which many files lie side by side, so that one gather can reach into all of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any

import numpy
from numpy.typing import NDArray

_FIXED = 0x10  # MAP_FIXED, the same on Linux and macOS; the mmap module does not name it
_UNBACKED = getattr(mmap, "MAP_NORESERVE", 0)
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value


class Region:
    """Address space that is reserved as a whole; files are mapped into it, read-only, and taken out again."""

    def __init__(self, size: int) -> None:
        self._size = whole_pages(max(1, size))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNBACKED
        self._begin = _map(None, self._size, _NO_ACCESS, flags, -1)
        raw = (ctypes.c_uint8 * self._size).from_address(self._begin)
        self.bytes: NDArray[numpy.uint8] = numpy.ctypeslib.as_array(raw)
        """All of it. What is not mapped must not be touched: that ends the process."""
        # Not when the interpreter ends: a thread may still be reading.
        weakref.finalize(raw, _libc().munmap, self._begin, self._size).atexit = False

    def put(self, at: int, descriptor: int, size: int) -> None:
        """Map a file of so many bytes to a place, which is a whole number of pages from the start."""
        _map(self._begin + at, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, descriptor)

    def take_out(self, at: int, size: int) -> None:
        """Give back what was mapped to a place."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNBACKED | _FIXED
        _map(self._begin + at, whole_pages(size), _NO_ACCESS, flags, -1)


def whole_pages(size: int) -> int:
    """Return a size rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(begin: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found: int | None = _libc().mmap(begin, size, protection, flags, descriptor, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
