"""Export the weights of a checkpoint as one safetensors file.

Every byte is verified before it is copied.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from paceline.checkpoint.catalog import Catalog, use_newest
from paceline.checkpoint.manifest import MANIFEST, FileFacts, damaged
from paceline.checkpoint.storage import Storage, read_manifest, read_verified, tensor_spans
from paceline.errors import BadCheckpoint, ConfigError, EnvironmentUnfit, PacelineError
from paceline.rundir import make_durable
from paceline.tensorfile import Spec, TensorSpan, header_bytes, plan_file

_MODEL = "model."
_SUFFIX = ".safetensors"


class Exported(NamedTuple):
    """The file that an export wrote."""

    step: int
    where: str
    path: Path
    tensors: int
    size_bytes: int
    passed_over: tuple[str, ...] = ()
    """Problems of newer checkpoints, which were skipped."""


def export_newest(catalog: Catalog, out: Path, *, force: bool = False) -> Exported:
    """Write the weights of the newest intact checkpoint, or those that the script made of them after the loop.

    A checkpoint that was named is never replaced by another.
    """
    refuse_path(out, force=force)
    problems: list[str] = []
    if (final := catalog.final()) is not None:
        try:
            return export(final.storage, final.steps()[-1], out, force=force)
        except BadCheckpoint as error:
            problems.append(error.problem)
    done, passed_over = use_newest(
        catalog, lambda step: export(catalog.storage, step, out, force=force)
    )
    return done._replace(passed_over=(*problems, *passed_over))


def export(storage: Storage, step: int, out: Path, *, force: bool = False) -> Exported:
    """Write the weights of one checkpoint, file by file.

    Leave no file behind if any byte is wrong.
    """
    manifest = read_manifest(storage, step)
    files = sorted(manifest.files.items())
    specs: list[Spec] = []
    for name, facts in files:
        spans = _unverified_spans(storage, step, name, facts)
        specs += [span.spec for span in _weights(spans)]
    if not specs:
        raise PacelineError(
            f"{storage.where(step)} contains no model weights",
            fix="export another step with --step",
        )
    layout = plan_file(sorted(specs), metadata={"format": "pt", "step": str(step)})
    pending = {span.spec: span for span in layout.places}
    with _atomic_file(out, force=force) as file:
        file.write(layout.header)
        file.truncate(layout.size_bytes)
        for name, facts in files:
            content = read_verified(storage, step, name, facts)
            _copy(content, storage.where(step), name, pending, file)
        if pending:
            raise damaged(storage.where(step), "its files changed while they were read")
    return Exported(step, storage.where(step), out, len(specs), layout.size_bytes)


def _unverified_spans(storage: Storage, step: int, name: str, facts: FileFacts) -> list[TensorSpan]:
    """Return where a file claims to hold tensors.

    Its checksum is verified later, when it is copied.
    """
    start = bytearray()
    try:
        for chunk in storage.chunks(step, name):
            start += chunk
            if len(start) >= header_bytes(start, facts.size_bytes):
                break
    except OSError as error:
        raise damaged(
            storage.where(step), f"{name} cannot be read ({error.strerror or error})"
        ) from error
    return tensor_spans(start, facts.size_bytes, storage.where(step), name)


def _weights(spans: list[TensorSpan]) -> list[TensorSpan]:
    """Return the tensors of the model, under the names of its state dict."""
    weights = []
    for span in spans:
        name = span.spec.name
        if name.startswith(_MODEL):
            spec = span.spec._replace(name=name.removeprefix(_MODEL))
            weights.append(span._replace(spec=spec))
    return weights


def _copy(
    content: bytearray, where: str, name: str, pending: dict[Spec, TensorSpan], file: BinaryIO
) -> None:
    """Copy the weights of one file to their offsets in the output, and remove them from `pending`."""
    with memoryview(content) as view:
        for span in _weights(tensor_spans(view, len(view), where, name)):
            if span.spec in pending:
                file.seek(pending.pop(span.spec).begin)
                file.write(view[span.begin : span.end])


def refuse_path(out: Path, *, force: bool) -> None:
    """Raise if no file can be written here, or if one would be overwritten."""
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
        raise ConfigError(f"{out} must end in {_SUFFIX}", fix=f"name it {out.with_suffix(_SUFFIX)}")
    if (out.parent / MANIFEST).exists():
        raise ConfigError(
            f"{out} is inside a checkpoint",
            fix="write it elsewhere: checkpoints are never modified",
        )
    if os.path.lexists(out) and not force:
        raise ConfigError(f"{out} exists", fix="choose another name, or overwrite it with --force")


@contextlib.contextmanager
def _atomic_file(out: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yield a temporary file that is renamed to `out` once it is complete and on disk, else removed."""
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
            fix="free some space, allow writing there, or choose another path",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
