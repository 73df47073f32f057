"""Shards at an address (s3:// and other schemes of fsspec), downloaded once per machine."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from paceline.config.checks import has_login
from paceline.data.shards.cache import Cache, is_cached
from paceline.data.shards.index import INDEX, LONGEST_INDEX, DatasetIndex, ShardFacts
from paceline.data.shards.store import LocalShardStore, ShardStore
from paceline.errors import ConfigError, DataError, EnvironmentUnfit
from paceline.objectstore import Unreachable, open_address, reaching

AHEAD = 2
"""Shards that are downloaded before they are needed."""

_CACHE = "~/.cache/paceline/shards"
_CHUNK_BYTES = 16 << 20
_PAUSES_S = (0.5, 1.5, 4.5)  # before the second, third and fourth attempt
_PERMANENT = (FileNotFoundError, PermissionError)  # another attempt cannot succeed

T = TypeVar("T")


def open_store(address: str, cache: str, cache_bytes: int) -> ShardStore:
    """Return the store of a folder, or of an address with a local cache."""
    scheme, mark, path = address.partition("://")
    if not mark:
        return LocalShardStore(Path(address))
    if scheme == "file":
        return LocalShardStore(Path(path))
    return RemoteShardStore(address, Path(cache or _CACHE).expanduser(), cache_bytes)


class RemoteShardStore:
    """A dataset at an address. The index is read once; shards are kept in the local cache."""

    def __init__(self, address: str, cache: Path, cache_bytes: int) -> None:
        if has_login(address):
            raise ConfigError(
                "the address of the dataset has a name or password in it",
                fix="remove it, and set the variables of the storage, such as "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        self.address, self.capacity_bytes = address.rstrip("/"), cache_bytes
        open_address(self.address)  # fail now if the scheme cannot be opened
        self._cache = Cache(cache, cache_bytes)
        self._opened: tuple[DatasetIndex, Path] | None = None
        self._wanted: list[ShardFacts] = []
        self._prefetcher_pid = 0  # the process whose thread prefetches: a fork has no such thread
        self._lock = threading.Lock()

    def index(self) -> DatasetIndex:
        """Return the index; only the first call downloads it."""
        return self._open()[0]

    def fetch(self, shard: ShardFacts) -> Path:
        """Return the path of a shard in the cache; download it first if needed.

        Another process may evict it at any time: a caller that finds no file fetches again.
        """
        path = self._open()[1] / shard.name
        with self._cache.writing():
            while not is_cached(path, shard.size_bytes):
                with self._cache.filling(path, shard.size_bytes) as file:
                    if file is not None:
                        _with_retries(partial(self._download, shard, file))
        return path

    def drop(self, shard: ShardFacts) -> None:
        """Delete a shard from the cache. A process that has mapped it keeps its mapping."""
        with self._cache.writing():
            (self._open()[1] / shard.name).unlink(missing_ok=True)

    def read_file(self, name: str) -> bytes:
        """Download a small file in the folder of the dataset."""
        return _with_retries(lambda: b"".join(self._chunks(name)))

    def prefetch(self, shards: Sequence[ShardFacts]) -> None:
        """Start to download the first few of these in the background.

        A failure is reported by `fetch`.
        """
        largest = max(shard.size_bytes for shard in self.index().shards)
        most = min(AHEAD, self.capacity_bytes // largest - 1)
        with self._lock:
            self._wanted = list(shards[:most])
            if self._wanted and self._prefetcher_pid != os.getpid():
                self._prefetcher_pid = os.getpid()
                threading.Thread(target=self._run, name="shard-prefetch", daemon=True).start()

    def _run(self) -> None:
        while shard := self._next():
            with contextlib.suppress(Exception):
                self.fetch(shard)

    def _next(self) -> ShardFacts | None:
        with self._lock:
            if self._wanted:
                return self._wanted.pop(0)
            self._prefetcher_pid = 0
            return None

    def _open(self) -> tuple[DatasetIndex, Path]:
        """Return the index, and the folder of this dataset in the cache."""
        if self._opened is None:
            index, digest = _with_retries(self._read_index)
            self._check_capacity(index)
            self._opened = index, self._cache.home(digest)
        return self._opened

    def _read_index(self) -> tuple[DatasetIndex, str]:
        where, content = f"{self.address}/{INDEX}", b""
        for chunk in self._chunks(INDEX):
            content += chunk
            if len(content) > LONGEST_INDEX:
                raise _wrong(where, f"it has more than {LONGEST_INDEX:,} bytes")
        index = DatasetIndex.from_json(content, where)
        return index, xxhash.xxh3_128_hexdigest(self.address.encode() + b"\0" + content)

    def _check_capacity(self, index: DatasetIndex) -> None:
        largest = max(shard.size_bytes for shard in index.shards)
        if largest > self.capacity_bytes:
            raise ConfigError(
                f"a shard of {self.address} has {largest:,} bytes and does not fit into "
                f"a cache of {self.capacity_bytes:,}",
                fix=f"set read.cache_gb={math.ceil(largest / 1e6) / 1e3:g} or more, or pack smaller shards",
            )

    def _download(self, shard: ShardFacts, descriptor: int) -> None:
        """Write a shard to a file, and verify its size and checksum."""
        where, checksum, size = f"{self.address}/{shard.name}", xxhash.xxh3_64(), 0
        with open(descriptor, "r+b", closefd=False) as file:
            file.seek(0)
            for chunk in self._chunks(shard.name):
                size += len(chunk)
                if size > shard.size_bytes:
                    raise _wrong(where, f"it has more than {shard.size_bytes:,} bytes")
                checksum.update(chunk)
                file.write(chunk)
        if size != shard.size_bytes:
            raise _wrong(where, f"it has {size:,} bytes instead of {shard.size_bytes:,}")
        if checksum.hexdigest() != shard.xxh3:
            difference = f"{checksum.hexdigest()} instead of {shard.xxh3}"
            raise _wrong(where, f"it has another checksum ({difference})")

    def _chunks(self, name: str) -> Iterator[bytes]:
        where = f"{self.address}/{name}"
        try:
            fs, root = open_address(self.address)  # not kept: connections do not survive a fork
            with reaching("read", where):
                fs.invalidate_cache()
                path = f"{root}/{name}"
                with fs.open(path, "rb", block_size=_CHUNK_BYTES, cache_type="none") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        yield chunk
        except FileNotFoundError as error:
            raise _missing(self.address, name) from error


def _with_retries(attempt: Callable[[], T]) -> T:
    """Retry temporary failures after increasing pauses."""
    for pause_s in _PAUSES_S:
        try:
            return attempt()
        except (Unreachable, DataError) as error:
            if isinstance(error.__cause__, _PERMANENT):
                raise
        time.sleep(pause_s)
    return attempt()


def _missing(address: str, name: str) -> EnvironmentUnfit:
    if name == INDEX:
        return DataError(
            f"{address} is not a dataset: it has no {name}",
            fix="check the address, or make a dataset with `paceline data pack` and copy it there, index.json last",
        )
    return DataError(
        f"{address}/{name} is missing, but the index lists it", fix="copy the dataset there again"
    )


def _wrong(where: str, why: str) -> DataError:
    return DataError(
        f"{where} does not match its index: {why}",
        fix="copy the dataset there again: the file is damaged or was changed",
    )
