"""Whether runs can be written to a folder, and how fast a write becomes durable."""

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

_LARGE_BYTES = 8 << 20
_SMALL_WRITES = 5
_SLOW_FSYNC_S = 0.5  # for a few bytes
_SLOW_BYTES_PER_S = 20e6
_MIN_FREE_BYTES = 5e9
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems that no other machine sees."""


@dataclass(frozen=True)
class DiskFacts:
    """Measurements of writes to a folder."""

    folder: str
    kind: str = ""
    """File system type."""
    free: int = 0
    refusal: str = ""
    """The error of a failed write."""
    fsync_s: float = 0.0
    """Median time until a few bytes are durable."""
    speed: float = 0.0
    """Bytes per second, durable, of a file of 8 MB."""


def probe_disk(folder: Path) -> DiskFacts:
    """Write test files to a folder, or its nearest existing parent, and remove them."""
    existing = next(part for part in [folder, *folder.parents] if part.exists())
    kind = filesystem_of(existing)
    try:
        free = shutil.disk_usage(existing).free
        with tempfile.TemporaryDirectory(prefix=".paceline-doctor-", dir=existing) as name:
            place = Path(name)
            small_s = sorted(_write(place / str(number), 512) for number in range(_SMALL_WRITES))
            large_s = _write(place / "large", _LARGE_BYTES)
    except OSError as error:
        return DiskFacts(str(folder), kind, refusal=error.strerror or str(error))
    median_s = small_s[_SMALL_WRITES // 2]
    speed = _LARGE_BYTES / max(large_s, 1e-9)
    return DiskFacts(str(folder), kind, free, fsync_s=median_s, speed=speed)


def _write(path: Path, size: int) -> float:
    content = os.urandom(size)  # some file systems compress
    begun = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def filesystem_of(folder: Path) -> str:
    """Return the file system type of a folder's mount; empty if /proc/mounts is not readable."""
    longest, found = "", ""
    with contextlib.suppress(OSError):
        real = str(folder.resolve())
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            mount, kind = line.split()[1:3]
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(longest):
                longest, found = mount, kind
    return found


def judge_disk(disk: DiskFacts) -> Finding:
    """Judge whether the folder is writable, durable, large and fast enough for runs."""
    if disk.refusal:
        return problem(
            "disk",
            f"cannot write to {disk.folder}: {disk.refusal}",
            "put the runs elsewhere: runs=FOLDER; see `quota`, `df -h` and `df -i`",
        )
    kind = disk.kind or "unknown file system"
    speed = f"fsync {short_time(disk.fsync_s)}, {human_size(disk.speed)}/s durable"
    text = f"{disk.folder} ({kind}): {human_size(disk.free)} free, {speed}"
    if disk.kind in IN_MEMORY:
        return problem(
            "disk",
            f"{text}; it is in memory and lost when the node goes down",
            "put the runs on a disk: runs=FOLDER",
        )
    if disk.free < _MIN_FREE_BYTES:
        return problem(
            "disk",
            f"{text}: nearly full",
            "free some space, or put the runs elsewhere: runs=FOLDER",
        )
    if disk.fsync_s > _SLOW_FSYNC_S or disk.speed < _SLOW_BYTES_PER_S:
        return problem(
            "disk",
            f"{text}: checkpoints will be slow",
            "put the runs on scratch: runs=FOLDER; or save less often: checkpoint.every=10m",
        )
    return passed("disk", text)
