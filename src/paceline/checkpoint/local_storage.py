"""Checkpoints in a folder: written under a temporary name, flushed to disk, then renamed."""

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

from paceline.checkpoint.manifest import LONGEST_MANIFEST, MANIFEST, FileFacts, Manifest
from paceline.checkpoint.storage import CHUNK_BYTES, folder_name, step_of
from paceline.rundir import make_durable, make_private, write_whole, writing_to
from paceline.safe_open import UnsafeFile, open_plain, read_bytes

_BLOCK = 4096  # O_DIRECT writes must be a multiple of this


class LocalStorage:
    """A folder of checkpoints, on this machine or on a shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = str(root)

    def within(self, name: str) -> LocalStorage:
        """Return the storage in a folder of this one."""
        return LocalStorage(self.root / name)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, newest first.

        A folder gets its name together with its manifest.
        """
        if not self.root.is_dir():
            return []
        steps = (step_of(path.name) for path in self.root.iterdir())
        return sorted((step for step in steps if step is not None), reverse=True)

    def where(self, step: int) -> str:
        """Return the path of a checkpoint."""
        return str(self._folder(step))

    def write(self, step: int, token: str, name: str, image: memoryview) -> tuple[str, FileFacts]:
        """Write one file, with O_DIRECT if the file system allows it, and compute its checksum meanwhile."""
        partial = self._partial(step, token)
        with writing_to(self.root):
            make_private(partial)
            checksum = _write_durably(partial / name, image)
        return name, FileFacts(len(image), checksum)

    def written_size(self, step: int, token: str, name: str) -> int:
        """Return the size of a file of an uncommitted checkpoint, or -1 if there is none."""
        try:
            return (self._partial(step, token) / name).stat().st_size
        except OSError:
            return -1

    def commit(self, step: int, token: str, manifest: Manifest) -> bool:
        """Write the manifest, then rename the folder, unless a checkpoint of this step exists."""
        partial, folder = self._partial(step, token), self._folder(step)
        with writing_to(self.root):
            make_private(partial)
            write_whole(partial / MANIFEST, manifest.to_json())
            if folder.exists() and not (folder / MANIFEST).exists():
                self.set_aside(step)  # its manifest was deleted
            try:
                # This fails if the target holds files, so nothing is overwritten.
                partial.rename(folder)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise
                shutil.rmtree(partial, ignore_errors=True)
                return False
            make_durable(self.root)
        return True

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint."""
        content = read_bytes(self._own_folder(step) / MANIFEST, LONGEST_MANIFEST)
        return Manifest.from_json(content, self.where(step))

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the size of every file, by folder."""
        sizes = {}
        for folder in self.root.iterdir() if self.root.is_dir() else []:
            # A running training may delete the folder meanwhile.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                sizes[folder.name] = {file.name: file.lstat().st_size for file in folder.iterdir()}
        return sizes

    def chunks(self, step: int, name: str, *, cached: bool = True) -> Iterator[memoryview]:
        """Read one file in chunks."""
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # page-aligned for O_DIRECT
        with os.fdopen(open_plain(self._own_folder(step) / name), "rb", buffering=0) as file:
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
        """Rename a checkpoint so that no reader finds it."""
        for number in range(1000):
            aside = self.root / f"aside-{folder_name(step)}{f'-{number}' if number else ''}"
            if not aside.exists():
                with writing_to(self.root):
                    self._folder(step).rename(aside)
                return str(aside)
        raise AssertionError("a thousand checkpoints of one step set aside")

    def delete(self, step: int) -> None:
        """Rename the folder, then remove its files."""
        doomed = self.root / f".deleted-{folder_name(step)}.{secrets.token_hex(4)}"
        with writing_to(self.root):
            self._folder(step).rename(doomed)
        # The next sweep removes files that another machine still reads.
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the leftovers of interrupted saves and deletions."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                if path.name.startswith((".step-", ".deleted-")):
                    shutil.rmtree(path, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self.root / folder_name(step)

    def _own_folder(self, step: int) -> Path:
        """Return the folder of a checkpoint; raise if it is a link to one elsewhere."""
        folder = self._folder(step)
        if folder.is_symlink():
            raise UnsafeFile(folder, "it is a symbolic link, not a folder")
        return folder

    def _partial(self, step: int, token: str) -> Path:
        return self.root / f".{folder_name(step)}.{token}"


def _write_durably(path: Path, image: memoryview) -> str:
    """Write bytes, flush them to disk, and return their checksum."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with ThreadPoolExecutor(1) as thread:  # computes the checksum while the disk writes
            checksum = thread.submit(xxhash.xxh3_64_hexdigest, image)
            whole = len(image) - len(image) % _BLOCK
            direct = _set_direct(file, on=True)
            for begin in range(0, whole, CHUNK_BYTES):
                chunk = image[begin : min(begin + CHUNK_BYTES, whole)]
                direct = _write_all(file, chunk, direct=direct)
            if direct:
                _set_direct(file, on=False)
            _write_all(file, image[whole:], direct=False)
            os.fsync(file)
            return checksum.result()
    finally:
        os.close(file)


def _write_all(file: int, chunk: memoryview, *, direct: bool) -> bool:
    """Write a chunk.

    Return whether O_DIRECT is still on (a file system may refuse it at the first write).
    """
    while len(chunk):
        try:
            chunk = chunk[os.write(file, chunk) :]
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            direct = _set_direct(file, on=False)
    return direct


def _set_direct(file: int, *, on: bool) -> bool:
    """Switch O_DIRECT on or off; return whether it is on."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
        return on and bool(direct)
    return False
