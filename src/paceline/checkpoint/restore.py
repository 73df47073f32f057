"""Which checkpoint to go on from, and its tensors. Only bytes that have been summed are ever returned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.checkpoint.image import read_places
from paceline.checkpoint.manifest import Manifest, NewerFormat
from paceline.checkpoint.staging import DTYPES
from paceline.checkpoint.storage import (
    NO_MANIFEST,
    Storage,
    read_manifest,
    read_verified,
    verify_file,
)
from paceline.errors import BadCheckpoint, EnvironmentUnfit
from paceline.world.collectives import texts_of_all
from paceline.world.world import World

_AGAIN_S = 0.2


def newest_good(
    storage: Storage, world: World, tell: Callable[[int, str], None]
) -> Manifest | None:
    """Return the newest checkpoint of which every byte is right; bad ones are told of and set aside. Every rank must call this."""
    steps = texts_of_all(world, " ".join(map(str, storage.steps())) if world.is_main else "")[0]
    for step in map(int, steps.split()):
        manifest, problem = _judge(storage, world, step)
        if problem:  # a file system may stumble once; what is bad stays bad
            time.sleep(_AGAIN_S)
            manifest, problem = _judge(storage, world, step)
        found = texts_of_all(world, problem)
        problems = [text for text in found if text]
        if not problems:
            return manifest
        if 0 < sum(NO_MANIFEST in text for text in found) < world.size:
            raise EnvironmentUnfit(
                f"some ranks see {storage.where(step)}, others do not",
                fix="put runs= or checkpoint.to= where all ranks see the same files",
            )
        if world.is_main:
            tell(step, f"{problems[0]}; it is kept as {storage.set_aside(step)}")
    return None


def _judge(storage: Storage, world: World, step: int) -> tuple[Manifest | None, str]:
    """Check this rank's share of the files; return the manifest, and what is wrong with it."""
    try:
        manifest = read_manifest(storage, step)
        for name in sorted(manifest.files)[world.rank :: world.size]:
            verify_file(storage, step, name, manifest.files[name])
    except NewerFormat:
        raise
    except BadCheckpoint as error:
        return None, error.problem
    return manifest, ""


def read_tensors(storage: Storage, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, file by file; they are views into memory that is gone with the last of a file."""
    for name, facts in sorted(manifest.files.items()):
        content = read_verified(storage, manifest.step, name, facts)
        where = f"{storage.where(manifest.step)}/{name}"
        for place in read_places(memoryview(content), len(content), where):
            dtype, count = DTYPES[place.spec.dtype], place.end - place.begin
            flat = (
                torch.frombuffer(content, dtype=torch.uint8, offset=place.begin, count=count)
                if count
                else torch.empty(0, dtype=torch.uint8)
            )
            yield place.spec.name, flat.view(dtype).reshape(place.spec.shape)
