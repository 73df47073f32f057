"""A file that holds the bytecode of many modules: an index as JSON, then what Python wrote for each, with its header."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.safe_open import open_plain

_MAGIC = b"paceline bytecode 1\n"
_NUMBER_BYTES = 8  # the length of the index, and its checksum
_LOW_32_BITS = 0xFFFFFFFF
_START = len(_MAGIC) + 2 * _NUMBER_BYTES


class Bytecode(NamedTuple):
    """The bytecode of a module, as Python keeps it in `__pycache__`."""

    source: str
    is_package: bool
    mtime_ns: int
    """When the source was written."""
    content: bytes

    def is_current(self, found: os.stat_result) -> bool:
        """Return whether this was compiled from a source with this time and size."""
        return self.content.startswith(header(found)) and self.mtime_ns == found.st_mtime_ns


def header(source: os.stat_result) -> bytes:
    """Return how Python begins the bytecode of a source with this time and size."""
    flags = 0  # others: the source is compared by a hash, or never
    numbers = flags, int(source.st_mtime) & _LOW_32_BITS, source.st_size & _LOW_32_BITS
    return importlib.util.MAGIC_NUMBER + b"".join(each.to_bytes(4, "little") for each in numbers)


class BytecodeFile:
    """Bytecode by the names of modules.

    It is read, not mapped into memory: a page of a mapped file that is cut off, or replaced on NFS, ends the process.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Open a file; without one, or if it is missing or damaged, there is no bytecode."""
        self._index: dict[str, list[Any]] = {}
        self._descriptor, self._begin = -1, 0
        if path is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                self._open(path)

    def _open(self, path: Path) -> None:
        self._descriptor = open_plain(path)
        head = os.pread(self._descriptor, _START, 0)
        numbers = head[len(_MAGIC) : -_NUMBER_BYTES], head[-_NUMBER_BYTES:]
        size, checksum = (int.from_bytes(number, "little") for number in numbers)
        if not head.startswith(_MAGIC) or size > os.fstat(self._descriptor).st_size:
            return
        index = os.pread(self._descriptor, size, _START)
        if zlib.crc32(index) == checksum:
            self._index, self._begin = json.loads(index), _START + size

    def get(self, name: str) -> Bytecode | None:
        """Return the bytecode of a module, unless it is not there or damaged."""
        if name not in self._index:
            return None
        source, is_package, mtime_ns, start, size, checksum = self._index[name]
        try:
            content = os.pread(self._descriptor, size, self._begin + start)
        except OSError:  # removed on another node, for example
            return None
        is_whole = zlib.crc32(content) == checksum
        return Bytecode(source, is_package, mtime_ns, content) if is_whole else None

    def current(self) -> dict[str, Bytecode]:
        """Return the modules whose sources are as they were."""
        found = {}
        for name in self._index:
            code = self.get(name)
            with contextlib.suppress(OSError):  # the source is gone
                if code and code.is_current(Path(code.source).stat()):
                    found[name] = code
        return found


def write_bytecode(path: Path, modules: Mapping[str, Bytecode]) -> None:
    """Write a file as a whole, or leave the old one."""
    from paceline.rundir import write_whole  # scripts of others should not pay for what it imports

    entries, place = {}, 0
    for name, (source, is_package, mtime_ns, content) in modules.items():
        entries[name] = source, is_package, mtime_ns, place, len(content), zlib.crc32(content)
        place += len(content)
    index = json.dumps(entries).encode()
    numbers = [value.to_bytes(_NUMBER_BYTES, "little") for value in (len(index), zlib.crc32(index))]
    contents = [code.content for code in modules.values()]
    write_whole(path, b"".join([_MAGIC, *numbers, index, *contents]), durable=False)
