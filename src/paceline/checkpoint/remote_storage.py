"""Checkpoints at an address (s3:// and whatever else fsspec knows). There is no rename there: the manifest is the commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import xxhash

from paceline.checkpoint.manifest import MANIFEST, FileFacts, Manifest
from paceline.checkpoint.storage import CHUNK_BYTES, folder_name, step_of
from paceline.errors import EnvironmentUnfit
from paceline.objectstore import open_address, reaching

_IN_BUCKETS = {"s3", "s3a", "gs", "gcs"}


class RemoteStorage:
    """A folder of checkpoints in an object store. Each writer's files have names of their own, so none is written over."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._fs, self._root = open_address(address)

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, the newest first."""
        return sorted(
            (step for step, names in self._found().items() if MANIFEST in names), reverse=True
        )

    def where(self, step: int) -> str:
        """Return the address of a checkpoint."""
        return f"{self.address}/{folder_name(step)}"

    def write(self, step: int, token: str, name: str, image: memoryview) -> tuple[str, FileFacts]:
        """Upload one file in pieces; the store shows it only when the last has come."""
        total = xxhash.xxh3_64()
        own = f"{token}-{name}"
        with (
            self._reaching("write"),
            self._fs.open(self._path(step, own), "wb", block_size=CHUNK_BYTES) as file,
        ):
            for begin in range(0, len(image), CHUNK_BYTES):
                chunk = image[begin : begin + CHUNK_BYTES]
                file.write(chunk)
                total.update(chunk)
        return own, FileFacts(len(image), total.hexdigest())

    def written_size(self, step: int, token: str, name: str) -> int:
        """Return the size of an object; -1 if it is not there."""
        with self._reaching("read"):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.size(self._path(step, name)))
            except FileNotFoundError:
                return -1

    def commit(self, step: int, token: str, manifest: Manifest) -> bool:
        """Put the manifest, unless there is one."""
        with self._reaching("write"):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._path(step, MANIFEST)) and self._put_first(
                step, manifest.to_json()
            ):
                return True
            for name in manifest.files:
                self._fs.rm_file(self._path(step, name))
        return False

    def _put_first(self, step: int, content: bytes) -> bool:
        """Put a manifest if there is none, in one act where the store can; return whether it is ours that is there."""
        try:
            self._fs.pipe_file(self._path(step, MANIFEST), content, mode="create")
        except FileExistsError:
            return False
        return True

    def manifest(self, step: int) -> Manifest:
        """Read what a checkpoint says of itself."""
        with self._reaching("read"):
            return Manifest.from_json(
                self._fs.cat_file(self._path(step, MANIFEST)), self.where(step)
            )

    def chunks(self, step: int, name: str, *, cached: bool = True) -> Iterator[memoryview]:
        """Read one file piece by piece."""
        with (
            self._reaching("read"),
            self._fs.open(self._path(step, name), "rb", block_size=CHUNK_BYTES) as file,
        ):
            while chunk := file.read(CHUNK_BYTES):
                yield memoryview(chunk)

    def set_aside(self, step: int) -> str:
        """Copy a checkpoint to a name that no reader takes, then delete it."""
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
        """Take the manifest away, then the files."""
        with self._reaching("write"):
            self._fs.rm_file(self._path(step, MANIFEST))
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):  # nothing but the manifest was left
                self._fs.rm(f"{self._root}/{folder_name(step)}", recursive=True)

    def sweep(self) -> None:
        """Remove uploads that never got a manifest, older than the newest checkpoint: another writer may be at a later one."""
        found = self._found()
        newest = max((step for step, names in found.items() if MANIFEST in names), default=-1)
        for step, names in found.items():
            if step < newest and MANIFEST not in names:
                with self._reaching("write"):
                    self._fs.rm(f"{self._root}/{folder_name(step)}", recursive=True)

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every file, by folder."""
        found: dict[str, dict[str, int]] = {}
        with self._reaching("read"), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            for path, facts in self._fs.find(self._root, detail=True).items():
                folder, _, name = path.removeprefix(self._root).lstrip("/").partition("/")
                found.setdefault(folder, {})[name] = facts["size"]
        if not found and self.address.partition("://")[0] in _IN_BUCKETS:
            self._see_bucket()
        return found

    def _see_bucket(self) -> None:
        """Tell a bucket without checkpoints from one that is not there."""
        bucket = self._root.partition("/")[0]
        with self._reaching("read"):
            if not self._fs.exists(bucket):
                raise EnvironmentUnfit(
                    f"{self.address}: there is no bucket {bucket!r}",
                    fix="create the bucket, or check the address",
                )

    def _found(self) -> dict[int, set[str]]:
        """Return the names of all files of checkpoints, and of what may become one, by step."""
        found = ((step_of(folder), set(files)) for folder, files in self.sizes().items())
        return {step: names for step, names in found if step is not None}

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{folder_name(step)}/{name}"

    def _reaching(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return reaching(verb, self.address)
