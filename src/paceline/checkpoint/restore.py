"""Choose the checkpoint to resume from, and read its tensors. Only verified bytes are returned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.checkpoint.manifest import FileFacts, Manifest, NewerFormat, damaged
from paceline.checkpoint.read_ahead import ReadAhead, share_of
from paceline.checkpoint.staging import DTYPES
from paceline.checkpoint.storage import (
    NO_MANIFEST,
    Storage,
    read_manifest,
    read_verified,
    tensor_spans,
    verify_file,
)
from paceline.errors import BadCheckpoint, EnvironmentUnfit
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

_RETRY_S = 0.2


def newest_good(
    storage: Storage,
    world: World,
    report: Callable[[int, str], None],
    check: Callable[[Manifest], None] = lambda _: None,
    ahead: ReadAhead | None = None,
) -> Manifest | None:
    """Return the newest intact checkpoint.

    Report and set aside damaged ones. `check` raises ValueError, TypeError, KeyError or AttributeError for a manifest
    with impossible values. Files that were read ahead are not read again. Every rank must call this.
    """
    steps = all_gather_texts(world, " ".join(map(str, storage.steps())) if world.is_main else "")[0]
    for step in map(int, steps.split()):
        manifest, problem = _verify_share(storage, world, step, check, ahead)
        if problem:  # a file system may fail once; damage is permanent
            time.sleep(_RETRY_S)
            manifest, problem = _verify_share(storage, world, step, check, ahead)
        answers = all_gather_texts(world, problem)
        problems = [text for text in answers if text]
        if not problems:
            return manifest
        if 0 < sum(NO_MANIFEST in text for text in answers) < world.size:
            raise EnvironmentUnfit(
                f"some ranks see {storage.where(step)}, others do not",
                fix="set runs= or checkpoint.to= to storage that all ranks share",
            )
        if world.is_main:
            report(step, f"{problems[0]}; it is kept as {storage.set_aside(step)}")
    return None


def _verify_share(
    storage: Storage,
    world: World,
    step: int,
    check: Callable[[Manifest], None],
    ahead: ReadAhead | None,
) -> tuple[Manifest | None, str]:
    """Verify this rank's share of the files; return the manifest and the first problem."""
    try:
        manifest = read_manifest(storage, step)
        for name in share_of(manifest, world.rank, world.size):
            _verify_file(storage, step, name, manifest.files[name], ahead)
        check(manifest)
    except NewerFormat:
        raise
    except BadCheckpoint as error:
        return None, error.problem
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"its manifest holds impossible values ({type(error).__name__}: {error})"
        return None, damaged(storage.where(step), why).problem
    return manifest, ""


def _verify_file(
    storage: Storage, step: int, name: str, facts: FileFacts, ahead: ReadAhead | None
) -> None:
    content = ahead.get(step, name, facts) if ahead else None
    if content is None:
        verify_file(storage, step, name, facts)
    else:
        tensor_spans(memoryview(content), len(content), storage.where(step), name)


def read_tensors(
    storage: Storage, manifest: Manifest, ahead: ReadAhead | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, file by file.

    Each is a view into the buffer of its file.
    """
    for name, facts in sorted(manifest.files.items()):
        content = ahead.get(manifest.step, name, facts) if ahead else None
        if content is None:
            content = read_verified(storage, manifest.step, name, facts)
        where = storage.where(manifest.step)
        for span in tensor_spans(memoryview(content), len(content), where, name):
            dtype, count = DTYPES[span.spec.dtype], span.end - span.begin
            flat = (
                torch.frombuffer(content, dtype=torch.uint8, offset=span.begin, count=count)
                if count
                else torch.empty(0, dtype=torch.uint8)
            )
            yield span.spec.name, flat.view(dtype).reshape(span.spec.shape)
