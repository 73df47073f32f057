"""Checkpoints at an address (s3:// and whatever else fsspec knows). There is no rename there: the manifest is the commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import xxhash

from paceline.checkpoint.manifest import MANIFEST, FileFacts, Manifest
from paceline.checkpoint.storage import CHUNK_BYTES, folder_name, step_of
from paceline.errors import ConfigError, EnvironmentUnfit

_ASIDE = "aside-manifest.json"


class RemoteStorage:
    """A folder of checkpoints in an object store. Each writer's files have names of their own, so none is written over."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._fs, self._root = _open(address)

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, the newest first."""
        return sorted((step for step, names in self._found().items() if MANIFEST in names), reverse=True)

    def where(self, step: int) -> str:
        """Return the address of a checkpoint."""
        return f"{self.address}/{folder_name(step)}"

    def write(self, step: int, token: str, name: str, image: memoryview) -> tuple[str, FileFacts]:
        """Upload one file in pieces; the store shows it only when the last has come."""
        total = xxhash.xxh3_64()
        own = f"{token}-{name}"
        with self._reaching("write"), self._fs.open(self._path(step, own), "wb", block_size=CHUNK_BYTES) as file:
            for begin in range(0, len(image), CHUNK_BYTES):
                chunk = image[begin : begin + CHUNK_BYTES]
                file.write(chunk)
                total.update(chunk)
        return own, FileFacts(len(image), total.hexdigest())

    def commit(self, step: int, token: str, manifest: Manifest) -> bool:
        """Put the manifest, unless there is one."""
        with self._reaching("write"):
            self._fs.invalidate_cache()
            if self._fs.exists(self._path(step, MANIFEST)):
                for name in manifest.files:
                    self._fs.rm_file(self._path(step, name))
                return False
            self._fs.pipe_file(self._path(step, MANIFEST), manifest.to_json())
        return True

    def manifest(self, step: int) -> Manifest:
        """Read what a checkpoint says of itself."""
        with self._reaching("read"):
            return Manifest.from_json(self._fs.cat_file(self._path(step, MANIFEST)), self.where(step))

    def chunks(self, step: int, name: str) -> Iterator[memoryview]:
        """Read one file piece by piece."""
        with self._reaching("read"), self._fs.open(self._path(step, name), "rb", block_size=CHUNK_BYTES) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield memoryview(chunk)

    def set_aside(self, step: int) -> str:
        """Give the manifest a name that no reader takes."""
        with self._reaching("write"):
            self._fs.pipe_file(self._path(step, _ASIDE), self._fs.cat_file(self._path(step, MANIFEST)))
            self._fs.rm_file(self._path(step, MANIFEST))
        return f"{self.where(step)}/{_ASIDE}"

    def delete(self, step: int) -> None:
        """Take the manifest away, then the files."""
        with self._reaching("write"):
            self._fs.rm_file(self._path(step, MANIFEST))
            self._fs.rm(f"{self._root}/{folder_name(step)}", recursive=True)

    def sweep(self) -> None:
        """Remove uploads that never got a manifest, older than the newest checkpoint: another writer may be at a later one."""
        found = self._found()
        newest = max((step for step, names in found.items() if MANIFEST in names), default=-1)
        for step, names in found.items():
            if step < newest and not {MANIFEST, _ASIDE} & names:
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
        return found

    def _found(self) -> dict[int, set[str]]:
        """Return the names of all files of checkpoints, and of what may become one, by step."""
        found = ((step_of(folder), set(files)) for folder, files in self.sizes().items())
        return {step: names for step, names in found if step is not None}

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{folder_name(step)}/{name}"

    @contextlib.contextmanager
    def _reaching(self, verb: str) -> Iterator[None]:
        """Turn whatever the store's own library raises into an error that names the address and the way out."""
        try:
            yield
        except (FileNotFoundError, EnvironmentUnfit):
            raise
        except Exception as error:
            raise EnvironmentUnfit(
                f"cannot {verb} {self.address}: {type(error).__name__}: {error}",
                fix="check the address, the network, and the storage's own variables (for S3: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)",
            ) from error


def _open(address: str) -> tuple[Any, str]:
    import fsspec  # type: ignore[import-untyped]

    scheme = address.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise EnvironmentUnfit(
            f"{scheme}:// needs a package that is not here ({error})", fix=f"pip install 'fsspec[{scheme}]'"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{address}: {error}",
            fix="use a path, s3://bucket/folder, or another address that fsspec knows",
        ) from error
    return fs, str(root).rstrip("/")
