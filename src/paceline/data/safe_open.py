"""Open files of unknown origin: only regular files, and only up to a size limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.errors import DataError

_FIX = "download or pack the dataset again"


def open_plain(path: Path) -> int:
    """Open a regular file for reading.

    Anything else, such as a pipe, is refused without waiting for it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a regular file", fix=_FIX)
    return descriptor


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes."""
    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DataError(f"{path} has {size:,} bytes; the limit is {most:,}", fix=_FIX)
        return file.read(most)
