"""Open files that somebody else may have made: only plain files, no link out of a folder, never more than a limit."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

SMALL_BYTES = 1 << 20
"""The most bytes of a file that holds a few facts: a lock, a heartbeat, a verdict."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
}


class UnsafeFile(OSError):
    """A path that does not lead to a plain file, or a file that is larger than its limit."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.EINVAL, problem, str(path))


def open_plain(path: Path, *, links: bool = False) -> int:
    """Open a plain file for reading, and return its descriptor; anything else is refused without waiting for it.

    With `links`, a symbolic link is followed: for files that the user names.
    """
    _refuse_special(path, path.stat() if links else path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    return _checked(path, descriptor)


def open_to_write(path: Path, flags: int) -> int:
    """Open a plain file for writing, and create it for its owner alone; a planted link or FIFO is refused."""
    mode = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CREAT
    try:
        descriptor = os.open(path, flags | mode, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            _refuse_special(path, path.lstat())
        raise
    return _checked(path, descriptor)


def reading(path: Path, *, links: bool = False) -> BinaryIO:
    """Open a plain file of any size for reading."""
    return os.fdopen(open_plain(path, links=links), "rb")


def read_bytes(path: Path, most: int, *, links: bool = False) -> bytes:
    """Return the content of a plain file of at most `most` bytes."""
    with reading(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most else file.read(most + 1)
        if size > most or len(content) > most:
            raise UnsafeFile(
                path, f"it has {max(size, len(content)):,} bytes; the limit is {most:,}"
            )
    return content


def read_text(path: Path, most: int = SMALL_BYTES, *, links: bool = False) -> str:
    """Return the text of a plain file of at most `most` bytes."""
    return read_bytes(path, most, links=links).decode()


def read_json(path: Path, most: int = SMALL_BYTES, *, links: bool = False) -> Any:
    """Return the JSON in a plain file of at most `most` bytes; raise ValueError if it is damaged."""
    return parse_json(read_bytes(path, most, links=links))


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text; raise ValueError for any text that is damaged, however deep its nesting.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: the JSON is nested too deeply
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def refuse_outside(path: Path, folder: Path) -> None:
    """Raise if a path leads out of a folder through a symbolic link."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UnsafeFile(path, f"it is a symbolic link out of {folder}")


def _checked(path: Path, descriptor: int) -> int:
    try:
        _refuse_special(path, os.fstat(descriptor))
    except UnsafeFile:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_special(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "a special file")
        raise UnsafeFile(path, f"it is {kind}, not a plain file")
