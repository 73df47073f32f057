"""Where checkpoints lie, and how one comes to exist only when it is whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

import xxhash

from paceline.checkpoint.manifest import FileFacts, Manifest, damaged

NO_MANIFEST = "its manifest is missing"
CHUNK_BYTES = 16 << 20
_NAME = re.compile(r"step-(\d{9,})")


class Storage(Protocol):
    """A place for the checkpoints of one run. A checkpoint exists when its manifest does."""

    address: str

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that exist, the newest first."""

    def where(self, step: int) -> str:
        """Return the name of a checkpoint for people."""

    def write(self, step: int, token: str, name: str, image: memoryview) -> tuple[str, FileFacts]:
        """Write one file of a checkpoint to be, durably; return the name it got, and its facts. Any rank may call this."""

    def written_size(self, step: int, token: str, name: str) -> int:
        """Return the size of a file of a checkpoint to be, as this rank sees it; -1 if it does not."""

    def commit(self, step: int, token: str, manifest: Manifest) -> bool:
        """Make a checkpoint exist, all of it at once; false if one of this step is there already, which then stays."""

    def manifest(self, step: int) -> Manifest:
        """Read what a checkpoint says of itself."""

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every file here, by folder: of checkpoints, and of what lies beside them."""

    def chunks(self, step: int, name: str, *, cached: bool = True) -> Iterator[memoryview]:
        """Read one file of a checkpoint, piece by piece; not `cached`: from the disk itself where that can be."""

    def set_aside(self, step: int) -> str:
        """Make sure that nobody takes a checkpoint again, and keep it; return where it is."""

    def delete(self, step: int) -> None:
        """Remove a checkpoint; at no moment is half of one to be seen."""

    def sweep(self) -> None:
        """Remove what interrupted saves left. Only who knows that nobody else is writing may call this."""


def folder_name(step: int) -> str:
    """Return the name of a checkpoint.

    >>> folder_name(120)
    'step-000000120'
    """
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step that a name stands for, if it is the name of a checkpoint.

    >>> step_of("step-000000120"), step_of(".step-000000120.a1"), step_of("aside-step-000000120")
    (120, None, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Read what a checkpoint says of itself, and see that it speaks of itself."""
    try:
        manifest = storage.manifest(step)
    except OSError as error:
        why = (
            NO_MANIFEST
            if isinstance(error, FileNotFoundError)
            else f"its manifest cannot be read ({error})"
        )
        raise damaged(storage.where(step), why) from error
    if manifest.step != step:
        raise damaged(storage.where(step), f"its manifest is of step {manifest.step}")
    return manifest


def read_verified(storage: Storage, step: int, name: str, facts: FileFacts) -> bytearray:
    """Return the bytes of one file; whatever is returned has been summed."""
    content, filled = bytearray(facts.size_bytes), 0
    for chunk in _verified(storage, step, name, facts):
        content[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return content


def verify_file(
    storage: Storage, step: int, name: str, facts: FileFacts, *, cached: bool = True
) -> None:
    """Read one file and see that every byte is what was written."""
    for _ in _verified(storage, step, name, facts, cached=cached):
        pass


def verify(storage: Storage, step: int, *, cached: bool = True) -> Manifest:
    """Read a whole checkpoint and see that every byte is what was written; return its manifest."""
    manifest = read_manifest(storage, step)
    for name, facts in manifest.files.items():
        verify_file(storage, step, name, facts, cached=cached)
    return manifest


def _verified(
    storage: Storage, step: int, name: str, facts: FileFacts, *, cached: bool = True
) -> Iterator[memoryview]:
    """Yield a file's bytes; the end is reached only if they were right."""
    total, seen = xxhash.xxh3_64(), 0
    try:
        for chunk in storage.chunks(step, name, cached=cached):
            total.update(chunk)
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
    if total.hexdigest() != facts.xxh3:
        raise damaged(
            storage.where(step),
            f"{name} has other bytes than were written (sum {total.hexdigest()} instead of {facts.xxh3})",
        )
