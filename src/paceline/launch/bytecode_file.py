"""A file that holds the bytecode of many modules: an index as JSON, then what Python wrote for each, with its header."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.safe_open import open_plain

_MAGIC = b"paceline bytecode 1\n"
_NUMBER_BYTES = 8  # the length of the index, and its checksum
_START = len(_MAGIC) + 2 * _NUMBER_BYTES


class Bytecode(NamedTuple):
    """The bytecode of a module, as Python keeps it in `__pycache__`."""

    source: str
    is_package: bool
    content: bytes

    def stats_if_current(self) -> dict[str, Any] | None:
        """Return time and size of the source if the bytecode was compiled from it."""
        magic, flags = self.content[:4], self._number(4)
        if magic != importlib.util.MAGIC_NUMBER or flags:  # flags: checked by a hash, or never
            return None
        try:
            found = os.stat(self.source)  # noqa: PTH116 - called thousands of times
        except OSError:
            return None
        if (
            self._number(8) != int(found.st_mtime) & 0xFFFFFFFF
            or self._number(12) != found.st_size & 0xFFFFFFFF
        ):
            return None
        return {"mtime": found.st_mtime, "size": found.st_size}

    def _number(self, place: int) -> int:
        return int.from_bytes(self.content[place : place + 4], "little")


class BytecodeFile:
    """Bytecode by the names of modules."""

    def __init__(self, path: Path | None = None) -> None:
        """Open a file; without one, or if it is missing or damaged, there is no bytecode."""
        self._index: dict[str, list[Any]] = {}
        self._data: mmap.mmap | bytes = b""
        self._begin = 0
        with contextlib.suppress(OSError, ValueError):
            if path is not None:
                self._open(path)

    def _open(self, path: Path) -> None:
        descriptor = open_plain(path)
        try:
            self._data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        magic, head = self._data[: len(_MAGIC)], self._data[len(_MAGIC) : _START]
        size, checksum = (
            int.from_bytes(part, "little") for part in (head[:_NUMBER_BYTES], head[_NUMBER_BYTES:])
        )
        index = self._data[_START : _START + size]
        if magic == _MAGIC and zlib.crc32(index) == checksum:
            self._index, self._begin = json.loads(index), _START + size

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def get(self, name: str) -> Bytecode | None:
        """Return the bytecode of a module, unless it is not there or damaged."""
        if name not in self._index:
            return None
        source, is_package, start, size, checksum = self._index[name]
        content = self._data[self._begin + start : self._begin + start + size]
        return Bytecode(source, is_package, content) if zlib.crc32(content) == checksum else None

    def current(self) -> dict[str, Bytecode]:
        """Return the modules whose sources are as they were."""
        modules = {name: self.get(name) for name in self._index}
        return {name: code for name, code in modules.items() if code and code.stats_if_current()}


def write_bytecode(path: Path, modules: Mapping[str, Bytecode]) -> None:
    """Write a file as a whole, or leave the old one."""
    from paceline.rundir import write_whole  # scripts of others should not pay for what it imports

    entries, place = {}, 0
    for name, (source, is_package, content) in modules.items():
        entries[name] = source, is_package, place, len(content), zlib.crc32(content)
        place += len(content)
    index = json.dumps(entries).encode()
    numbers = [
        number.to_bytes(_NUMBER_BYTES, "little") for number in (len(index), zlib.crc32(index))
    ]
    contents = [code.content for code in modules.values()]
    write_whole(path, b"".join([_MAGIC, *numbers, index, *contents]), durable=False)
