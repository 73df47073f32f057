"""The interface of checkpoint storage, and how bytes are verified as they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

import xxhash

from paceline import tensorfile
from paceline.checkpoint.manifest import FileFacts, Manifest, damaged
from paceline.tensorfile import TensorSpan

FINAL = "final"
"""The folder, beside the checkpoints, of the weights that the script changed after the loop. No resume loads them."""
NO_MANIFEST = "its manifest is missing"
CHUNK_BYTES = 16 << 20
_NAME = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,14})")


class Storage(Protocol):
    """The checkpoints of one run. A checkpoint exists once its manifest does."""

    address: str

    def within(self, name: str) -> Storage:
        """Return the storage in a folder of this one."""

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, newest first."""

    def where(self, step: int) -> str:
        """Return the path or address of a checkpoint, for messages."""

    def write(self, step: int, token: str, name: str, image: memoryview) -> tuple[str, FileFacts]:
        """Write one file of an uncommitted checkpoint durably.

        Return its name, size and checksum. Any rank may call this.
        """

    def written_size(self, step: int, token: str, name: str) -> int:
        """Return the size of a file of an uncommitted checkpoint, or -1 if this rank does not see it."""

    def commit(self, step: int, token: str, manifest: Manifest) -> bool:
        """Publish a checkpoint atomically.

        Return False, and keep the old one, if the step has one already.
        """

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint."""

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the size of every file by folder, including files that belong to no checkpoint."""

    def chunks(self, step: int, name: str, *, cached: bool = True) -> Iterator[memoryview]:
        """Read one file in chunks; with `cached=False` bypass the page cache if possible."""

    def set_aside(self, step: int) -> str:
        """Rename a checkpoint so that no reader finds it; return its new path or address."""

    def delete(self, step: int) -> None:
        """Remove a checkpoint atomically: no reader ever sees half of one."""

    def sweep(self) -> None:
        """Remove files of interrupted saves. Call this only while no other process writes."""


def folder_name(step: int) -> str:
    """Return the folder of a checkpoint.

    >>> folder_name(120)
    'step-000000120'
    """
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint folder, None for other names.

    >>> step_of("step-000000120"), step_of(".step-000000120.a1"), step_of("aside-step-000000120")
    (120, None, None)
    >>> step_of("step-1000000000"), step_of("step-0000000120"), step_of("step-٠٠٠٠٠٠١٢٠")
    (1000000000, None, None)
    """
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Read a manifest; raise `BadCheckpoint` if it is unreadable or belongs to another step."""
    try:
        manifest = storage.manifest(step)
    except FileNotFoundError as error:
        raise damaged(storage.where(step), NO_MANIFEST) from error
    except OSError as error:
        raise damaged(storage.where(step), f"its manifest cannot be read ({error})") from error
    if manifest.step != step:
        raise damaged(storage.where(step), f"its manifest belongs to step {manifest.step}")
    return manifest


def tensor_spans(
    start: bytes | bytearray | memoryview, size_bytes: int, where: str, name: str
) -> list[TensorSpan]:
    """Return where the tensors of a file lie, from its first bytes, which must include the header."""
    try:
        return tensorfile.read_places(start, size_bytes)
    except ValueError as error:
        raise damaged(where, f"{name} is not a safetensors file ({error})") from error


def read_verified(storage: Storage, step: int, name: str, facts: FileFacts) -> bytearray:
    """Return the bytes of one file after their checksum was verified."""
    content = bytearray()  # grows with the bytes that are there: the manifest may claim any size
    for chunk in _verified(storage, step, name, facts):
        content += chunk
    return content


def verify_file(
    storage: Storage, step: int, name: str, facts: FileFacts, *, cached: bool = True
) -> None:
    """Read one file, and raise `BadCheckpoint` if its checksum is wrong, or if it is not a safetensors file."""
    start = bytearray()
    for chunk in _verified(storage, step, name, facts, cached=cached):
        wanted = tensorfile.header_bytes(start[:8] + chunk[:8], facts.size_bytes)
        start += chunk[: max(0, wanted - len(start))]
    tensor_spans(start, facts.size_bytes, storage.where(step), name)


def verify(storage: Storage, step: int, *, cached: bool = True) -> Manifest:
    """Read all files of a checkpoint, verify their checksums, and return the manifest."""
    manifest = read_manifest(storage, step)
    for name, facts in manifest.files.items():
        verify_file(storage, step, name, facts, cached=cached)
    return manifest


def _verified(
    storage: Storage, step: int, name: str, facts: FileFacts, *, cached: bool = True
) -> Iterator[memoryview]:
    """Yield the bytes of a file; raise at the end if its checksum is wrong."""
    checksum, seen = xxhash.xxh3_64(), 0
    try:
        for chunk in storage.chunks(step, name, cached=cached):
            checksum.update(chunk)
            seen += len(chunk)
            if seen > facts.size_bytes:
                break
            yield chunk
    except FileNotFoundError as error:
        raise damaged(storage.where(step), f"{name} is missing") from error
    except OSError as error:
        raise damaged(
            storage.where(step), f"{name} cannot be read ({error.strerror or error})"
        ) from error
    if seen != facts.size_bytes:
        most = "more than " if seen > facts.size_bytes else ""
        raise damaged(
            storage.where(step),
            f"{name} has {most}{min(seen, facts.size_bytes):,} bytes instead of {facts.size_bytes:,}",
        )
    if checksum.hexdigest() != facts.xxh3:
        raise damaged(
            storage.where(step),
            f"{name} has other bytes than were written (checksum {checksum.hexdigest()} instead of {facts.xxh3})",
        )
