"""Whether runs can be written here, and how fast a write becomes durable."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.finding import Finding, passed, problem
from paceline.units import human_size, short_time

_WRITTEN = 8 << 20
_SMALL = 5
_SLOW_S = 0.5  # for a few bytes
_SLOW_BYTES = 20e6  # a second
_LEAST_FREE = 5e9
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


@dataclass(frozen=True)
class DiskFacts:
    """What writing to a folder is like."""

    folder: str
    kind: str = ""
    free: int = 0
    refusal: str = ""
    """Why nothing can be written."""
    fsync_s: float = 0.0
    """The median time until a few bytes are durable."""
    speed: float = 0.0
    """Bytes a second, durable, of a file of 8 MB."""


def probe_disk(folder: Path) -> DiskFacts:
    """Write a little into a folder, or the nearest one above it that exists, and leave nothing behind."""
    there = next(part for part in [folder, *folder.parents] if part.exists())
    kind = filesystem_of(there)
    try:
        free = shutil.disk_usage(there).free
        with tempfile.TemporaryDirectory(prefix=".paceline-doctor-", dir=there) as place:
            small = sorted(_write(Path(place) / str(number), 512) for number in range(_SMALL))
            large_s = _write(Path(place) / "large", _WRITTEN)
    except OSError as error:
        return DiskFacts(str(folder), kind, refusal=error.strerror or str(error))
    return DiskFacts(
        str(folder), kind, free, fsync_s=small[_SMALL // 2], speed=_WRITTEN / max(large_s, 1e-9)
    )


def _write(path: Path, size: int) -> float:
    content = os.urandom(size)  # some file systems compress
    begun = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def filesystem_of(folder: Path) -> str:
    """Return what file system a folder lies on."""
    best, found = "", ""
    with contextlib.suppress(OSError):
        real = str(folder.resolve())
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            place, kind = line.split()[1:3]
            inside = real == place or real.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best):
                best, found = place, kind
    return found


def judge_disk(disk: DiskFacts) -> Finding:
    """Judge the folder of the runs."""
    if disk.refusal:
        return problem(
            "disk",
            f"{disk.folder} cannot be written: {disk.refusal}",
            "put the runs elsewhere: runs=FOLDER; see `quota`, `df -h` and `df -i`",
        )
    said = f"{disk.folder} ({disk.kind or 'file system not known'}): {human_size(disk.free)} free, fsync {short_time(disk.fsync_s)}, {human_size(disk.speed)}/s durable"
    if disk.kind in _IN_MEMORY:
        return problem(
            "disk",
            f"{said}; it is memory, and gone with the node",
            "put the runs on a disk: runs=FOLDER",
        )
    if disk.free < _LEAST_FREE:
        return problem(
            "disk", f"{said}: soon full", "free some space, or put the runs elsewhere: runs=FOLDER"
        )
    if disk.fsync_s > _SLOW_S or disk.speed < _SLOW_BYTES:
        return problem(
            "disk",
            f"{said}: checkpoints will be slow",
            "put the runs on scratch: runs=FOLDER; or save less often: checkpoint.every=10m",
        )
    return passed("disk", said)
