"""Checkpoints in an object store (s3:// or any other fsspec address), where writing the manifest is the commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import xxhash

from paceline.checkpoint.manifest import LONGEST_MANIFEST, MANIFEST, FileFacts, Manifest
from paceline.checkpoint.storage import CHUNK_BYTES, folder_name, step_of
from paceline.errors import EnvironmentUnfit
from paceline.objectstore import open_address, reaching

_IN_BUCKETS = {"s3", "s3a", "gs", "gcs"}


class RemoteStorage:
    """Checkpoints under one prefix.

    File names carry the token of their writer, so that none is overwritten.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._fs, self._root = open_address(address)

    def within(self, name: str) -> RemoteStorage:
        """Return the storage under a longer prefix."""
        return RemoteStorage(f"{self.address}/{name}")

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, newest first."""
        files = self._files_by_step()
        return sorted((step for step, names in files.items() if MANIFEST in names), reverse=True)

    def where(self, step: int) -> str:
        """Return the address of a checkpoint."""
        return f"{self.address}/{folder_name(step)}"

    def write(self, step: int, token: str, name: str, image: memoryview) -> tuple[str, FileFacts]:
        """Upload one file in chunks; the store shows it once the last chunk has arrived."""
        checksum = xxhash.xxh3_64()
        unique = f"{token}-{name}"
        with (
            self._reaching("write"),
            self._fs.open(self._path(step, unique), "wb", block_size=CHUNK_BYTES) as file,
        ):
            for begin in range(0, len(image), CHUNK_BYTES):
                chunk = image[begin : begin + CHUNK_BYTES]
                file.write(chunk)
                checksum.update(chunk)
        return unique, FileFacts(len(image), checksum.hexdigest())

    def written_size(self, step: int, token: str, name: str) -> int:
        """Return the size of an object, or -1 if there is none."""
        with self._reaching("read"):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.size(self._path(step, name)))
            except FileNotFoundError:
                return -1

    def commit(self, step: int, token: str, manifest: Manifest) -> bool:
        """Write the manifest, unless this step has one."""
        with self._reaching("write"):
            self._fs.invalidate_cache()
            exists = self._fs.exists(self._path(step, MANIFEST))
            if not exists and self._create(step, manifest.to_json()):
                return True
            for name in manifest.files:
                self._fs.rm_file(self._path(step, name))
        return False

    def _create(self, step: int, content: bytes) -> bool:
        """Create a manifest, atomically where the store can.

        Return False if another writer was first.
        """
        try:
            self._fs.pipe_file(self._path(step, MANIFEST), content, mode="create")
        except FileExistsError:
            return False
        return True

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint."""
        with self._reaching("read"):
            content = self._fs.cat_file(self._path(step, MANIFEST), end=LONGEST_MANIFEST + 1)
            return Manifest.from_json(content, self.where(step))

    def chunks(self, step: int, name: str, *, cached: bool = True) -> Iterator[memoryview]:
        """Read one file in chunks."""
        with (
            self._reaching("read"),
            self._fs.open(self._path(step, name), "rb", block_size=CHUNK_BYTES) as file,
        ):
            while chunk := file.read(CHUNK_BYTES):
                yield memoryview(chunk)

    def set_aside(self, step: int) -> str:
        """Copy a checkpoint to a prefix that no reader looks at, then delete it."""
        names = {
            f"aside-{folder_name(step)}{f'-{number}' if number else ''}" for number in range(1000)
        }
        aside = min(names - set(self.sizes()), key=lambda name: (len(name), name))
        with self._reaching("write"):
            for path in self._fs.find(f"{self._root}/{folder_name(step)}"):
                self._fs.cp_file(path, f"{self._root}/{aside}/{path.rpartition('/')[2]}")
        self.delete(step)
        return f"{self.address}/{aside}"

    def delete(self, step: int) -> None:
        """Remove the manifest, then the files."""
        with self._reaching("write"):
            self._fs.rm_file(self._path(step, MANIFEST))
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):  # only the manifest was left
                self._fs.rm(f"{self._root}/{folder_name(step)}", recursive=True)

    def sweep(self) -> None:
        """Remove uncommitted uploads older than the newest checkpoint.

        Another writer may be at a later step.
        """
        files = self._files_by_step()
        newest = max((step for step, names in files.items() if MANIFEST in names), default=-1)
        for step, names in files.items():
            if step < newest and MANIFEST not in names:
                with self._reaching("write"):
                    self._fs.rm(f"{self._root}/{folder_name(step)}", recursive=True)

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the size of every file, by folder."""
        sizes: dict[str, dict[str, int]] = {}
        with self._reaching("read"), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            for path, facts in self._fs.find(self._root, detail=True).items():
                folder, _, name = path.removeprefix(self._root).lstrip("/").partition("/")
                sizes.setdefault(folder, {})[name] = facts["size"]
        if not sizes and self.address.partition("://")[0] in _IN_BUCKETS:
            self._check_bucket()
        return sizes

    def _check_bucket(self) -> None:
        """Raise if the bucket does not exist."""
        bucket = self._root.partition("/")[0]
        with self._reaching("read"):
            if not self._fs.exists(bucket):
                raise EnvironmentUnfit(
                    f"{self.address}: there is no bucket {bucket!r}",
                    fix="create the bucket, or check the address",
                )

    def _files_by_step(self) -> dict[int, set[str]]:
        """Return the files of all checkpoints, committed or not."""
        names_by_step = {}
        for folder, files in self.sizes().items():
            step = step_of(folder)
            if step is not None:
                names_by_step[step] = set(files)
        return names_by_step

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{folder_name(step)}/{name}"

    def _reaching(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return reaching(verb, self.address)
