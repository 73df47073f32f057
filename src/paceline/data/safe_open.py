"""Files that somebody else may have made: what is no plain file is refused, and nothing is read without a bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.errors import DataError


def open_plain(path: Path) -> int:
    """Open a plain file for reading; what is none, such as a pipe, is refused and never waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a plain file", fix="fetch or pack the set again")
    return descriptor


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a plain file that has at most so many."""
    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DataError(
                f"{path} has {size:,} bytes, which is too many", fix="fetch or pack the set again"
            )
        return file.read(most)
