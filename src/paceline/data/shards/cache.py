"""A bounded cache of downloaded shards, shared by all processes of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.errors import EnvironmentUnfit
from paceline.rundir import make_private

_DATASET = re.compile(r"set-[0-9a-f]{32}")
_PART, _LOCK = ".part", "lock"
_POLL_S = 0.05
_PATIENCE_S = 600.0  # for another process that makes no progress


class _CachedShard(NamedTuple):
    path: Path
    size_bytes: int
    used_ns: int


class Cache:
    """A folder with one folder per dataset.

    A file with the name of a shard was verified before it got that name.

    A download is a file with another name and the final size, locked by the process that
    writes it. The kernel releases the lock when that process dies, and a download without a
    lock is deleted.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root, self._most_bytes = root, most_bytes

    def home(self, digest: str) -> Path:
        """Return the folder of a dataset."""
        return self._root / f"set-{digest}"

    @contextlib.contextmanager
    def filling(self, path: Path, size_bytes: int) -> Iterator[int | None]:
        """Yield a file that becomes the shard on success; None if it is already cached."""
        part = path.with_name(f".{path.name}{_PART}")
        descriptor = _create_locked(part)
        try:
            if is_cached(path, size_bytes):
                yield None
                return
            self._reserve(descriptor, size_bytes)
            yield descriptor
            os.fsync(descriptor)
            with _locked(self._root / _LOCK):  # so that a scan counts it under one of its names
                part.replace(path)
        finally:
            if _is_file_at(part, descriptor):
                part.unlink()
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child holds the same lock
            os.close(descriptor)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a disk error into one that names the folder and the fix."""
        try:
            yield
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot keep shards in {self._root}: {error.strerror or error}",
                fix="set read.cache to a folder on a local disk with read.cache_gb of free space, or lower read.cache_gb",
            ) from error

    def _reserve(self, descriptor: int, size_bytes: int) -> None:
        """Evict the least recently used shards, and give a file its final size."""
        before, since_s = -1, time.monotonic()
        while True:
            with _locked(self._root / _LOCK):
                arriving, cached = self._scan()
                if arriving + size_bytes <= self._most_bytes:
                    held = sum(shard.size_bytes for shard in cached)
                    _evict(cached, arriving + size_bytes + held - self._most_bytes)
                    os.truncate(descriptor, size_bytes)
                    return
            if arriving != before:
                before, since_s = arriving, time.monotonic()
            # The downloads of other processes fill the cache.
            _wait_for_others(self._root, time.monotonic() - since_s)

    def _scan(self) -> tuple[int, list[_CachedShard]]:
        """Return the bytes of running downloads and the cached shards.

        Delete abandoned downloads.
        """
        arriving, cached = 0, []
        for folder in [path for path in self._root.iterdir() if _DATASET.fullmatch(path.name)]:
            with contextlib.suppress(OSError):  # only an empty folder can be removed
                folder.rmdir()
                continue
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # a download that has just failed
                    status = path.lstat()
                    if not path.name.endswith(_PART):
                        cached.append(_CachedShard(path, status.st_size, status.st_mtime_ns))
                    elif not _delete_if_abandoned(path):
                        arriving += status.st_size
        return arriving, cached


def is_cached(path: Path, size_bytes: int) -> bool:
    """Return whether a shard is in the cache, and mark it as used now."""
    try:
        if path.stat().st_size != size_bytes:
            return False
        now = time.time_ns()  # the clock of the file system may be too coarse to order two uses
        os.utime(path, ns=(now, now))
    except FileNotFoundError:
        return False
    return True


def _evict(cached: list[_CachedShard], excess_bytes: int) -> None:
    """Delete the least recently used shards. A process that has mapped one keeps its mapping."""
    for shard in sorted(cached, key=lambda shard: shard.used_ns):
        if excess_bytes <= 0:
            return
        shard.path.unlink(missing_ok=True)
        excess_bytes -= shard.size_bytes


def _create_locked(part: Path) -> int:
    """Wait until no other process downloads this shard.

    Return an empty, locked file at the path.
    """
    while True:
        # FileNotFoundError: another process has removed the folder while it was empty.
        with contextlib.suppress(FileNotFoundError):
            make_private(part.parent)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                _lock(descriptor, part)
            except BaseException:
                os.close(descriptor)
                raise
            if _is_file_at(part, descriptor):
                os.ftruncate(descriptor, 0)  # discard the bytes of an interrupted download
                return descriptor
            os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Lock a file; wait for another process while that writes it, and a while longer."""
    begun_s = time.time()
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        _wait_for_others(path, time.time() - max(begun_s, os.fstat(descriptor).st_mtime))


def _wait_for_others(path: Path, quiet_s: float) -> None:
    if quiet_s > _PATIENCE_S:
        raise EnvironmentUnfit(
            f"another process holds {path}, and has written nothing for {quiet_s:.0f} s",
            fix=f"find it with `fuser {path}` and end it, or set read.cache to another folder",
        )
    time.sleep(_POLL_S)


def _is_file_at(path: Path, descriptor: int) -> bool:
    """Return whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _delete_if_abandoned(part: Path) -> bool:
    descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _lock(descriptor, path)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
