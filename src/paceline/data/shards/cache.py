"""Which shards from elsewhere are kept on this machine: so many bytes of them, shared by all processes that read here."""

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

_SET = re.compile(r"set-[0-9a-f]{32}")
_PART, _LOCK = ".part", "lock"
_LOOK_S = 0.05


class _Kept(NamedTuple):
    path: Path
    size_bytes: int
    used_ns: int


class Cache:
    """A folder with a folder for each set. What bears a shard's name was verified before it got it.

    A shard that is on its way is a file with another name, of the size it will have, locked by who brings it. The kernel
    lets go of the lock when that process dies; what nobody has locked is rubbish.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root, self._most_bytes = root, most_bytes

    def home(self, digest: str) -> Path:
        """Return the folder of a set."""
        return self._root / f"set-{digest}"

    @contextlib.contextmanager
    def filling(self, path: Path, size_bytes: int) -> Iterator[int | None]:
        """Hold a file that becomes the shard when this ends well; none if it turns out that another process has brought it."""
        part = path.with_name(f".{path.name}{_PART}")
        descriptor = _own(part)
        try:
            if is_here(path, size_bytes):
                yield None
                return
            self._make_room(descriptor, size_bytes)
            yield descriptor
            os.fsync(descriptor)
            with _locked(self._root / _LOCK):  # who counts what is here sees one name or the other
                part.replace(path)
        finally:
            if _names(part, descriptor):
                part.unlink()
            fcntl.flock(
                descriptor, fcntl.LOCK_UN
            )  # a child that was forked meanwhile holds the same lock
            os.close(descriptor)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure of the disk into an error that names the folder and the way out."""
        try:
            yield
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot keep shards in {self._root}: {error.strerror or error}",
                fix="set read.cache to a folder of a local disk that has room for read.cache_gb, or make that smaller",
            ) from error

    def _make_room(self, descriptor: int, size_bytes: int) -> None:
        """Give a file its size, once the least recently used shards are gone that stand in its way."""
        while True:
            with _locked(self._root / _LOCK):
                coming, kept = self._look()
                if coming + size_bytes <= self._most_bytes:
                    _unlink_oldest(
                        kept,
                        coming
                        + size_bytes
                        + sum(file.size_bytes for file in kept)
                        - self._most_bytes,
                    )
                    os.truncate(descriptor, size_bytes)
                    return
            time.sleep(_LOOK_S)  # what others bring right now fills the room

    def _look(self) -> tuple[int, list[_Kept]]:
        """Return how many bytes are on their way, and what is here; sweep what interrupted downloads left."""
        coming, kept = 0, []
        for folder in [path for path in self._root.iterdir() if _SET.fullmatch(path.name)]:
            with contextlib.suppress(OSError):  # only a folder without files can be removed
                folder.rmdir()
                continue
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # a download that has just failed
                    facts = path.lstat()
                    if not path.name.endswith(_PART):
                        kept.append(_Kept(path, facts.st_size, facts.st_mtime_ns))
                    elif not _sweep(path):
                        coming += facts.st_size
        return coming, kept


def is_here(path: Path, size_bytes: int) -> bool:
    """Return whether a shard is in the cache; if so, it has now been used."""
    try:
        if path.stat().st_size != size_bytes:
            return False
        now = (
            time.time_ns()
        )  # the file system's own clock may tick too coarsely to tell which was used last
        os.utime(path, ns=(now, now))
    except FileNotFoundError:
        return False
    return True


def _unlink_oldest(kept: list[_Kept], excess_bytes: int) -> None:
    """Unlink shards until there is no excess. A process that has mapped one keeps what it has mapped."""
    for file in sorted(kept, key=lambda file: file.used_ns):
        if excess_bytes <= 0:
            return
        file.path.unlink(missing_ok=True)
        excess_bytes -= file.size_bytes


def _own(part: Path) -> int:
    """Wait until nobody else brings this shard; return a file that bears the name and is locked."""
    while True:
        with contextlib.suppress(
            FileNotFoundError
        ):  # another process found the folder empty, and removed it
            make_private(part.parent)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except BaseException:
                os.close(descriptor)
                raise
            if _names(part, descriptor):
                os.ftruncate(descriptor, 0)  # what an interrupted download left counts for nothing
                return descriptor
            os.close(descriptor)


def _names(path: Path, descriptor: int) -> bool:
    """Return whether a name still stands for the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _sweep(part: Path) -> bool:
    """Remove what a download left that nobody goes on with; return whether that was so."""
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
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
