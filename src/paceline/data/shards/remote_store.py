"""Shards at an address (s3:// and whatever else fsspec knows), each brought to this machine once, whoever asks."""

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
from paceline.data.shards.cache import Cache, is_here
from paceline.data.shards.index import INDEX, LONGEST_INDEX, DatasetIndex, ShardFacts
from paceline.data.shards.store import LocalShardStore, ShardStore
from paceline.errors import ConfigError, DataError, EnvironmentUnfit
from paceline.objectstore import Unreachable, open_address, reaching

AHEAD = 2
"""How many shards are brought ahead of the one that is read."""

_CACHE = "~/.cache/paceline/shards"
_CHUNK_BYTES = 16 << 20
_PAUSES_S = (0.5, 1.5, 4.5)  # before the second try, the third and the last
_HOPELESS = (FileNotFoundError, PermissionError)  # what another try does not mend

T = TypeVar("T")


def open_store(address: str, cache: str, cache_bytes: int) -> ShardStore:
    """Return the store of a folder, or of an address whose shards are kept in `cache`: at most so many bytes of them."""
    scheme, mark, path = address.partition("://")
    if not mark:
        return LocalShardStore(Path(address))
    if scheme == "file":
        return LocalShardStore(Path(path))
    return RemoteShardStore(address, Path(cache or _CACHE).expanduser(), cache_bytes)


class RemoteShardStore:
    """The folder of a set at an address. The index is read from there, once; shards are kept here for a while."""

    def __init__(self, address: str, cache: Path, cache_bytes: int) -> None:
        if has_login(address):
            raise ConfigError(
                "the set has a name or password in its address",
                fix="leave it out, and set the storage's own variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        self.address, self.capacity_bytes = address.rstrip("/"), cache_bytes
        open_address(self.address)  # what cannot be opened is said before anything is read
        self._cache = Cache(cache, cache_bytes)
        self._known: tuple[DatasetIndex, Path] | None = None
        self._wanted: list[ShardFacts] = []
        self._busy = (
            0  # the process whose thread brings what is wanted: a fork leaves the thread behind
        )
        self._lock = threading.Lock()

    def index(self) -> DatasetIndex:
        """Read index.json, the first time; from then on it is known."""
        return self._facts()[0]

    def fetch(self, shard: ShardFacts) -> Path:
        """Return where a shard lies in the cache, after it was brought there if need be.

        Another process may need its room: who finds nothing at that path fetches again.
        """
        path = self._facts()[1] / shard.name
        with self._cache.writing():
            while not is_here(path, shard.size_bytes):
                with self._cache.filling(path, shard.size_bytes) as file:
                    if file is not None:
                        _persistently(partial(self._download, shard, file))
        return path

    def drop(self, shard: ShardFacts) -> None:
        """Take a shard out of the cache. Who has mapped it keeps what he has mapped."""
        with self._cache.writing():
            (self._facts()[1] / shard.name).unlink(missing_ok=True)

    def read_file(self, name: str) -> bytes:
        """Read a small file that lies beside the shards, each time it is asked for."""
        return _persistently(lambda: b"".join(self._chunks(name)))

    def prefetch(self, shards: Sequence[ShardFacts]) -> None:
        """Begin to bring the first few of these, in the background, and no others. What fails is told when it is fetched."""
        most = min(
            AHEAD, self.capacity_bytes // max(shard.size_bytes for shard in self.index().shards) - 1
        )
        with self._lock:
            self._wanted = list(shards[:most])
            if self._wanted and self._busy != os.getpid():
                self._busy = os.getpid()
                threading.Thread(target=self._bring, name="shards ahead", daemon=True).start()

    def _bring(self) -> None:
        while shard := self._next():
            with contextlib.suppress(Exception):
                self.fetch(shard)

    def _next(self) -> ShardFacts | None:
        with self._lock:
            if self._wanted:
                return self._wanted.pop(0)
            self._busy = 0
            return None

    def _facts(self) -> tuple[DatasetIndex, Path]:
        """Return what the set says of itself, and the folder of this set and no other in the cache."""
        if self._known is None:
            index, digest = _persistently(self._read_index)
            self._check_room(index)
            self._known = index, self._cache.home(digest)
        return self._known

    def _read_index(self) -> tuple[DatasetIndex, str]:
        content = b""
        for chunk in self._chunks(INDEX):
            content += chunk
            if len(content) > LONGEST_INDEX:
                raise _wrong(f"{self.address}/{INDEX}", f"it has more than {LONGEST_INDEX:,} bytes")
        index = DatasetIndex.from_json(content, f"{self.address}/{INDEX}")
        return index, xxhash.xxh3_128_hexdigest(self.address.encode() + b"\0" + content)

    def _check_room(self, index: DatasetIndex) -> None:
        largest = max(shard.size_bytes for shard in index.shards)
        if largest > self.capacity_bytes:
            raise ConfigError(
                f"a cache of {self.capacity_bytes:,} bytes cannot hold a shard of {self.address}, which has {largest:,}",
                fix=f"set read.cache_gb={math.ceil(largest / 1e6) / 1e3:g} or more, or pack smaller shards",
            )

    def _download(self, shard: ShardFacts, descriptor: int) -> None:
        """Write a shard from its first byte on; this ends well only if every byte is right."""
        where, total, seen = f"{self.address}/{shard.name}", xxhash.xxh3_64(), 0
        with open(descriptor, "r+b", closefd=False) as file:
            file.seek(0)
            for chunk in self._chunks(shard.name):
                seen += len(chunk)
                if seen > shard.size_bytes:
                    raise _wrong(where, f"it has more than {shard.size_bytes:,} bytes")
                total.update(chunk)
                file.write(chunk)
        if seen != shard.size_bytes:
            raise _wrong(where, f"it has {seen:,} bytes instead of {shard.size_bytes:,}")
        if total.hexdigest() != shard.xxh3:
            raise _wrong(
                where, f"it has other bytes (sum {total.hexdigest()} instead of {shard.xxh3})"
            )

    def _chunks(self, name: str) -> Iterator[bytes]:
        """Read one file of the set piece by piece."""
        where = f"{self.address}/{name}"
        try:
            fs, root = open_address(self.address)  # not kept: a connection does not outlive a fork
            with reaching("read", where):
                fs.invalidate_cache()
                with fs.open(
                    f"{root}/{name}", "rb", block_size=_CHUNK_BYTES, cache_type="none"
                ) as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        yield chunk
        except FileNotFoundError as error:
            raise _missing(self.address, name) from error


def _persistently(attempt: Callable[[], T]) -> T:
    """Try again, after growing pauses, what may be better the next time."""
    for pause_s in _PAUSES_S:
        try:
            return attempt()
        except (Unreachable, DataError) as error:
            if isinstance(error.__cause__, _HOPELESS):
                raise
        time.sleep(pause_s)
    return attempt()


def _missing(address: str, name: str) -> EnvironmentUnfit:
    if name == INDEX:
        return DataError(
            f"there is no set in {address}: {name} is missing",
            fix="make one with `paceline data pack` and copy it there, index.json last, or check the address",
        )
    return DataError(
        f"{address}/{name} is missing",
        fix="copy the set there again: its index speaks of that file",
    )


def _wrong(where: str, why: str) -> DataError:
    return DataError(
        f"{where} is not what its index says: {why}",
        fix="copy the set there again: it was damaged, or changed meanwhile",
    )
