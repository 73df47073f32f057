"""How the weights of a checkpoint become one plain safetensors file. Every byte is summed before it is taken."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from paceline.checkpoint.catalog import Catalog, use_newest
from paceline.checkpoint.image import read_places
from paceline.checkpoint.manifest import MANIFEST, FileFacts, damaged
from paceline.checkpoint.storage import Storage, read_manifest, read_verified
from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError
from paceline.rundir import make_durable
from paceline.tensorfile import Spec, TensorSpan, plan_file

_MODEL = "model."
_SUFFIX = ".safetensors"


class Exported(NamedTuple):
    """A file that was written."""

    step: int
    where: str
    path: Path
    tensors: int
    size_bytes: int
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, which were not taken."""


def export_newest(catalog: Catalog, out: Path, *, force: bool = False) -> Exported:
    """Write the weights of the newest good checkpoint; one that was asked for is never replaced by another."""
    refuse_path(out, force=force)
    done, passed_over = use_newest(
        catalog, lambda step: export(catalog.storage, step, out, force=force)
    )
    return done._replace(passed_over=passed_over)


def export(storage: Storage, step: int, out: Path, *, force: bool = False) -> Exported:
    """Write the weights of one checkpoint, file by file; nothing is left if any byte of it is wrong."""
    manifest = read_manifest(storage, step)
    files = sorted(manifest.files.items())
    specs = [
        place.spec
        for name, facts in files
        for place in _weights(_planned(storage, step, name, facts))
    ]
    if not specs:
        raise PacelineError(
            f"{storage.where(step)} holds no weights of a model",
            fix="export another step with --step",
        )
    image = plan_file(sorted(specs), metadata={"format": "pt", "step": str(step)})
    room = {place.spec: place for place in image.places}
    with _becoming(out, force=force) as file:
        file.write(image.header)
        file.truncate(image.size_bytes)
        for name, facts in files:
            _copy(
                read_verified(storage, step, name, facts),
                f"{storage.where(step)}/{name}",
                room,
                file,
            )
        if room:
            raise damaged(storage.where(step), "its files changed while they were read")
    return Exported(step, storage.where(step), out, len(specs), image.size_bytes)


def _planned(storage: Storage, step: int, name: str, facts: FileFacts) -> list[TensorSpan]:
    """Return what a file says it holds. It has not been summed yet, so this is a plan, to be held against the file itself."""
    start = bytearray()
    try:
        for chunk in storage.chunks(step, name):
            start += chunk
            if len(start) >= 8 + int.from_bytes(start[:8], "little"):
                break
    except OSError as error:
        raise damaged(
            storage.where(step), f"{name} cannot be read ({error.strerror or error})"
        ) from error
    return read_places(memoryview(start), facts.size_bytes, f"{storage.where(step)}/{name}")


def _weights(places: list[TensorSpan]) -> list[TensorSpan]:
    """Return the model's tensors under the model's own names."""
    return [
        place._replace(spec=place.spec._replace(name=place.spec.name.removeprefix(_MODEL)))
        for place in places
        if place.spec.name.startswith(_MODEL)
    ]


def _copy(content: bytearray, where: str, room: dict[Spec, TensorSpan], file: BinaryIO) -> None:
    """Copy the weights of one file to their places, and take those off the list."""
    with memoryview(content) as view:
        for place in _weights(read_places(view, len(view), where)):
            if place.spec in room:
                file.seek(room.pop(place.spec).begin)
                file.write(view[place.begin : place.end])


def refuse_path(out: Path, *, force: bool) -> None:
    """Refuse to write where no file can be, or where something would be lost."""
    if "://" in str(out) or not out.parent.is_dir():
        raise ConfigError(
            f"there is no folder {out.parent}",
            fix="create it first, or give a path on this machine",
        )
    if out.is_dir():
        raise ConfigError(
            f"{out} is a folder", fix=f"name a file in it: {out / 'model.safetensors'}"
        )
    if out.suffix != _SUFFIX:
        raise ConfigError(
            f"{out} would be a safetensors file", fix=f"name it {out.with_suffix(_SUFFIX)}"
        )
    if (out.parent / MANIFEST).exists():
        raise ConfigError(
            f"{out} lies inside a checkpoint",
            fix="write it elsewhere: a checkpoint stays as it was saved",
        )
    if os.path.lexists(out) and not force:
        raise ConfigError(f"{out} exists", fix="give another name, or write over it with --force")


@contextlib.contextmanager
def _becoming(out: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yield a file that gets its name only when it is whole and on disk; else nothing of it stays."""
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        refuse_path(out, force=force)
        partial.replace(out)
        make_durable(out.parent)
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {out}: {error.strerror or error}",
            fix="free some space or permit writing there, or give another path",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
