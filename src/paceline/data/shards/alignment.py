"""Where a file must lie in memory, so that the items of each of its columns begin at a whole multiple of their size.

Then all columns of all files are rows of one matrix each, and the fastest gather there is can fetch them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from functools import lru_cache

_LONGEST = 1 << 32  # of address space that is given for it, for each file,
_MOST = 1 << 45  # and for all: a quarter of what a process has


def period_of(sizes: Iterable[int], lengths: Iterable[int]) -> int | None:
    """Return after how many bytes pages and items of these sizes begin together again.

    None, if files of these lengths would take too many addresses: each has as many whole periods as it needs, and one more.

    >>> period_of([784, 8], [1_000_000]) == math.lcm(mmap.PAGESIZE, 784), period_of([4_194_301], [1_000_000])
    (True, None)
    """
    period = math.lcm(mmap.PAGESIZE, *(size for size in sizes if size))
    fits = (
        period <= _LONGEST and sum(-(-length // period) + 1 for length in lengths) * period <= _MOST
    )
    return period if fits else None


@lru_cache(maxsize=64)
def shift_of(columns: tuple[tuple[int, int], ...], period: int) -> int | None:
    """Return by how many bytes, in whole pages, a file must be moved from the start of a period; None: it cannot be.

    A column is given by where it begins in the file, and the size of its items.

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
