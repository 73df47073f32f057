"""What the tests put into checkpoints, and how they look at what came out."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.commit import Saved
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.restore import newest_good, read_tensors
from paceline.checkpoint.save import Saver
from paceline.checkpoint.staging import DTYPES
from paceline.checkpoint.storage import Storage
from paceline.errors import EnvironmentUnfit
from paceline.world.world import World

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 5), (2, 0, 4), (7, 1, 2)]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random bits, whatever number they stand for."""
    width = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    values = 2 if dtype is torch.bool else 256
    raw = torch.randint(values, (count * width,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def tensors_of(seed: int) -> dict[str, Tensor]:
    """Return tensors of every type and of odd shapes, some larger than a disk block."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        f"model.{word}.{number}": random_tensor(shape, dtype, generator)
        for word, dtype in DTYPES.items()
        for number, shape in enumerate([*SHAPES, (41, 67)])
    }
    return found | {"model.large": random_tensor((300, 211), torch.float32, generator)}


def bits_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return a digest of type, shape and bytes, by name."""
    return {name: digest(value) for name, value in sorted(tensors.items())}


def digest(value: Tensor) -> str:
    raw = (
        value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    )
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"


def draft(step: int, **more: Any) -> Manifest:
    """Return a manifest that still lacks its files."""
    return Manifest(step=step, samples=step * 16, files={}, **more)


def new_saver(storage: Storage, world: World = World(), **options: Any) -> Saver:
    return Saver(storage, world, os.urandom(4).hex(), **options)


def save(storage: Storage, step: int, tensors: dict[str, Tensor], **more: Any) -> list[Saved]:
    """Save one checkpoint in a world of one, and wait for it."""
    saver = new_saver(storage)
    saver.save(tensors, draft(step, **more))
    saver.close()
    return saver.finished()


def save_all(storage: Storage, steps: tuple[int, ...], **options: Any) -> None:
    """Save some steps in a world of one, one after the other."""
    saver = new_saver(storage, **options)
    for step in steps:
        saver.save(tensors_of(step), draft(step))
    saver.close()
    assert [done.manifest.step for done in saver.finished()] == list(steps)


def failed_save(storage: Storage, step: int = 1) -> EnvironmentUnfit:
    """Return the error of a save that fails."""
    saver = new_saver(storage)
    saver.save(tensors_of(step), draft(step))
    saver.close()
    with pytest.raises(EnvironmentUnfit) as caught:
        saver.finished()
    return caught.value


def restore(
    storage: Storage, world: World = World()
) -> tuple[int, dict[str, str], list[tuple[int, str]]]:
    """Return the step that is gone on from, the bits of its tensors, and what was told of others."""
    told: list[tuple[int, str]] = []
    found = newest_good(storage, world, lambda step, why: told.append((step, why)))
    if found is None:
        return 0, {}, told
    tensors = {name: value.clone() for name, value in read_tensors(storage, found)}
    return found.step, bits_of(tensors), told


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, byte by byte."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, byte: int = -1, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def part_of(root: Path, step: int) -> Path:
    """Return the first file of tensors of a checkpoint."""
    return min((root / f"step-{step:09d}").glob("*.safetensors"))


def until_writers_are_done() -> None:
    """Wait for saves of a run that broke off."""
    for thread in threading.enumerate():
        if thread.name == "paceline-save":
            thread.join(30)


def local(folder: Path) -> LocalStorage:
    return LocalStorage(folder)
