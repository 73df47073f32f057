"""What an IDX file holds: the format of MNIST, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy
from numpy.typing import NDArray

from paceline.errors import DataError

_UNSIGNED_BYTES = 0x08


def read_idx(folder: Path, name: str, sha256: str = "") -> NDArray[numpy.uint8]:
    """Return the array of `folder/name` or `folder/name.gz`; `sha256` is that of the unpacked file."""
    path, content = _content(folder, name)
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        _parse(path, content)  # says what is wrong, if it is no whole IDX file at all
        raise DataError(
            f"{path} is an IDX file, but not the {name} it should be (checksum differs)",
            fix="fetch that file again",
        )
    return _parse(path, content)


def _content(folder: Path, name: str) -> tuple[Path, bytes]:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path, _unpacked(path)
    raise DataError(
        f"there is neither {name} nor {name}.gz in {folder}",
        fix=f"put that file into {folder}, or name another folder in PACELINE_DATA",
    )


def _unpacked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            fix="fetch that file again: it is truncated or damaged",
        ) from error


def _parse(path: Path, content: bytes) -> NDArray[numpy.uint8]:
    if (
        len(content) < 4
        or content[:2] != b"\0\0"
        or content[2] != _UNSIGNED_BYTES
        or not 1 <= content[3] <= 4
    ):
        raise DataError(
            f"{path} is not an IDX file of bytes (it starts with {content[:4].hex() or 'nothing'})",
            fix="fetch that file again",
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} is truncated within its header", fix="fetch that file again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} should hold {math.prod(shape):,} bytes {shape}, but holds {len(content) - start:,}",
            fix="fetch that file again",
        )
    return numpy.frombuffer(content, dtype=numpy.uint8, offset=start).reshape(shape).copy()
