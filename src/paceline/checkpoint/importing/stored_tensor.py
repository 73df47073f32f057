"""Where the bytes of a tensor lie: in a safetensors file, or in memory for a single number."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from paceline.errors import DataError
from paceline.safe_open import reading
from paceline.tensorfile import header_bytes, read_places

_NUMBERS = {bool: ("BOOL", "<?"), int: ("I64", "<q"), float: ("F64", "<d")}
_FORMS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}


class StoredTensor(NamedTuple):
    """A tensor that has not been read yet. Two that share their bytes are equal."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    path: Path | None
    begin: int = 0
    content: bytes = b""
    """The bytes, if they are not in a file."""

    def read_into(self, target: memoryview) -> None:
        """Copy the bytes; raise if the file has become shorter."""
        if self.path is None:
            target[:] = self.content
            return
        with reading(self.path, links=True) as file:
            file.seek(self.begin)
            filled = 0
            while filled < self.size_bytes:
                count = file.readinto(target[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise truncated(self.path, "it became shorter while it was read")
                filled += count


def store_number(value: float) -> StoredTensor:
    """Return a Python number as a tensor that holds it exactly."""
    dtype, form = _NUMBERS[type(value)]
    try:
        content = struct.pack(form, value)
    except struct.error as error:
        raise DataError(f"{value} does not fit into {dtype}", fix="use --weights-only") from error
    return StoredTensor(dtype, (), len(content), None, content=content)


def read_number(value: object) -> float | None:
    """Return a number that was stored as such or as a tensor of one value; None for anything else."""
    if isinstance(value, bool | int | float):
        return value
    if (
        not isinstance(value, StoredTensor)
        or value.dtype not in _FORMS
        or value.shape not in {(), (1,)}
    ):
        return None
    content = bytearray(value.size_bytes)
    value.read_into(memoryview(content))
    (number,) = struct.unpack(_FORMS[value.dtype], content)
    return float(number)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, without reading their bytes."""
    try:
        with reading(path, links=True) as file:
            length, size_bytes = file.read(8), os.fstat(file.fileno()).st_size
            start = length + file.read(header_bytes(length, size_bytes) - 8)
        places = read_places(start, size_bytes)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", fix="check its permissions"
        ) from error
    except ValueError as error:
        raise truncated(path, f"it is not a safetensors file ({error})") from error
    found = {}
    for spec, begin, end in places:
        found[spec.name] = StoredTensor(spec.dtype, spec.shape, end - begin, path, begin)
    return found


def truncated(path: Path, why: str) -> DataError:
    """Return the error for a file with other bytes than it should have."""
    return DataError(f"cannot read {path}: {why}", fix="copy the file again, or save it again")
