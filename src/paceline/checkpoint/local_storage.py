"""Checkpoints in a folder: written under a temporary name, made durable, then given their name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from paceline.checkpoint.manifest import MANIFEST, FileFacts, Manifest
from paceline.checkpoint.storage import CHUNK_BYTES, folder_name, step_of
from paceline.rundir import make_durable, make_private, write_whole, writing_to

_BLOCK = 4096  # what a direct write must be a multiple of


class LocalStorage:
    """A folder of checkpoints, on this machine or on a file system that all ranks see."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = str(root)

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that exist, the newest first. Their folders come with their manifests."""
        if not self.root.is_dir():
            return []
        found = [step_of(path.name) for path in self.root.iterdir()]
        return sorted((step for step in found if step is not None), reverse=True)

    def where(self, step: int) -> str:
        """Return the path of a checkpoint."""
        return str(self._folder(step))

    def write(self, step: int, token: str, name: str, image: memoryview) -> tuple[str, FileFacts]:
        """Write one file, past the page cache where the file system lets us, and sum it on the way."""
        partial = self._partial(step, token)
        with writing_to(self.root):
            make_private(partial)
            total = _write_durably(partial / name, image)
        return name, FileFacts(len(image), total)

    def written_size(self, step: int, token: str, name: str) -> int:
        """Return the size of a file of a checkpoint to be; -1 if it is not there."""
        try:
            return (self._partial(step, token) / name).stat().st_size
        except OSError:
            return -1

    def commit(self, step: int, token: str, manifest: Manifest) -> bool:
        """Write the manifest, then give the folder its name; a folder that has the name already stays."""
        partial, folder = self._partial(step, token), self._folder(step)
        with writing_to(self.root):
            make_private(partial)
            write_whole(partial / MANIFEST, manifest.to_json())
            if folder.exists() and not (folder / MANIFEST).exists():
                self.set_aside(step)  # somebody took its manifest away
            try:
                partial.rename(
                    folder
                )  # onto a folder with files in it this fails, so nothing is written over
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise
                shutil.rmtree(partial, ignore_errors=True)
                return False
            make_durable(self.root)
        return True

    def manifest(self, step: int) -> Manifest:
        """Read what a checkpoint says of itself."""
        return Manifest.from_json((self._folder(step) / MANIFEST).read_bytes(), self.where(step))

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every file, by folder."""
        found = {}
        for folder in self.root.iterdir() if self.root.is_dir() else []:
            with contextlib.suppress(
                FileNotFoundError, NotADirectoryError
            ):  # a run may be deleting it
                found[folder.name] = {file.name: file.stat().st_size for file in folder.iterdir()}
        return found

    def chunks(self, step: int, name: str, *, cached: bool = True) -> Iterator[memoryview]:
        """Read one file piece by piece."""
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # aligned, as a direct read wants it
        with (self._folder(step) / name).open("rb", buffering=0) as file:
            direct = not cached and _set_direct(file.fileno(), on=True)
            while True:
                try:
                    count = file.readinto(buffer)
                except OSError as error:
                    if not (direct and error.errno == errno.EINVAL):
                        raise
                    direct = _set_direct(file.fileno(), on=False)
                    continue
                if not count:
                    return
                yield buffer[:count]

    def set_aside(self, step: int) -> str:
        """Give a checkpoint a name that no reader takes."""
        for number in range(1000):
            aside = self.root / f"aside-{folder_name(step)}{f'-{number}' if number else ''}"
            if not aside.exists():
                with writing_to(self.root):
                    self._folder(step).rename(aside)
                return str(aside)
        raise AssertionError("a thousand checkpoints of one step set aside")

    def delete(self, step: int) -> None:
        """Take the name away, then the files."""
        doomed = self.root / f".deleted-{folder_name(step)}.{secrets.token_hex(4)}"
        with writing_to(self.root):
            self._folder(step).rename(doomed)
        shutil.rmtree(
            doomed, ignore_errors=True
        )  # what another machine still reads goes with the next sweep

    def sweep(self) -> None:
        """Remove what interrupted saves and deletions left."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                if path.name.startswith((".step-", ".deleted-")):
                    shutil.rmtree(path, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self.root / folder_name(step)

    def _partial(self, step: int, token: str) -> Path:
        return self.root / f".{folder_name(step)}.{token}"


def _write_durably(path: Path, image: memoryview) -> str:
    """Write bytes, flush them to disk, and return their sum."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with ThreadPoolExecutor(1) as beside:  # the sum is taken while the disk writes
            total = beside.submit(xxhash.xxh3_64_hexdigest, image)
            whole = len(image) - len(image) % _BLOCK
            direct = _set_direct(file, on=True)
            for begin in range(0, whole, CHUNK_BYTES):
                direct = _write_all(
                    file, image[begin : min(begin + CHUNK_BYTES, whole)], direct=direct
                )
            if direct:
                _set_direct(file, on=False)
            _write_all(file, image[whole:], direct=False)
            os.fsync(file)
            return total.result()
    finally:
        os.close(file)


def _write_all(file: int, chunk: memoryview, *, direct: bool) -> bool:
    """Write a chunk; return whether direct writing still holds (a file system may refuse it at the first write)."""
    while len(chunk):
        try:
            chunk = chunk[os.write(file, chunk) :]
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            direct = _set_direct(file, on=False)
    return direct


def _set_direct(file: int, *, on: bool) -> bool:
    """Write past the page cache, or not; return whether we now do."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
        return on and bool(direct)
    return False
