"""Read IDX files, the format of MNIST, gzipped or not."""

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
    """Return the array of `folder/name` or `folder/name.gz`.

    `sha256` is the checksum of the unpacked file.
    """
    path, content = _content(folder, name)
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        _parse(path, content)  # raises a better error if it is not an IDX file at all
        raise DataError(
            f"{path} is an IDX file, but its checksum is not that of {name}",
            fix="download the file again",
        )
    return _parse(path, content)


def _content(folder: Path, name: str) -> tuple[Path, bytes]:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path, _unpacked(path)
    raise DataError(
        f"{folder} has neither {name} nor {name}.gz",
        fix=f"put the file into {folder}, or set PACELINE_DATA to the folder that has it",
    )


def _unpacked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            fix="download the file again: it is truncated or damaged",
        ) from error


def _parse(path: Path, content: bytes) -> NDArray[numpy.uint8]:
    magic = bytes([0, 0, _UNSIGNED_BYTES])
    if len(content) < 4 or content[:3] != magic or not 1 <= content[3] <= 4:
        raise DataError(
            f"{path} is not an IDX file of bytes (it starts with {content[:4].hex() or 'nothing'})",
            fix="download the file again",
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} is truncated in its header", fix="download the file again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} must have {math.prod(shape):,} bytes of data {shape}, got {len(content) - start:,}",
            fix="download the file again",
        )
    return numpy.frombuffer(content, dtype=numpy.uint8, offset=start).reshape(shape).copy()
