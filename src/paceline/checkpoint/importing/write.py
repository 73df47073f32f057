"""Write imported tensors as a checkpoint of a run."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.checkpoint.importing.stored_tensor import StoredTensor
from paceline.checkpoint.manifest import FileFacts, Manifest
from paceline.checkpoint.storage import Storage
from paceline.errors import ConfigError
from paceline.tensorfile import Spec, plan_file
from paceline.version import VERSION

_PART_BYTES = 1 << 30  # one file of the checkpoint is in memory at a time


def write_checkpoint(
    storage: Storage, step: int, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any]
) -> Manifest:
    """Write files of about 1 GiB, then the manifest; return it."""
    token, files = secrets.token_hex(4), {}
    parts = list(_split(tensors))
    for number, part in enumerate(parts, start=1):
        name = f"part-{number:05d}-of-{len(parts):05d}.safetensors"
        written, facts = _write_part(storage, step, token, name, part)
        files[written] = facts
    versions = {"paceline": VERSION}
    manifest = Manifest(step=step, samples=0, files=files, values=values, versions=versions)
    if not storage.commit(step, token, manifest):
        raise ConfigError(
            f"{storage.where(step)} was made by another process meanwhile",
            fix="import into another run",
        )
    return manifest


def _write_part(
    storage: Storage, step: int, token: str, name: str, part: Mapping[Spec, StoredTensor]
) -> tuple[str, FileFacts]:
    layout = plan_file(part)
    image = memoryview(mmap.mmap(-1, layout.size_bytes))  # page-aligned for O_DIRECT
    image[: len(layout.header)] = layout.header
    for spec, begin, end in layout.places:
        part[spec].read_into(image[begin:end])
    return storage.write(step, token, name, image)


def _split(tensors: Mapping[str, StoredTensor]) -> Iterator[dict[Spec, StoredTensor]]:
    """Yield the tensors in parts that fit into memory."""
    part: dict[Spec, StoredTensor] = {}
    size_bytes = 0
    for name, value in sorted(tensors.items()):
        if part and size_bytes + value.size_bytes > _PART_BYTES:
            yield part
            part, size_bytes = {}, 0
        part[Spec(name, value.dtype, value.shape)] = value
        size_bytes += value.size_bytes
    yield part
