"""The cache of shards while another process holds it and does nothing."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from paceline.data.shards import cache as module
from paceline.data.shards.cache import Cache
from paceline.errors import EnvironmentUnfit

DIGEST = "0" * 32


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    return Cache(tmp_path, 100)


def test_a_download_that_another_process_holds_is_not_waited_for_endlessly(cache: Cache) -> None:
    shard = cache.home(DIGEST) / "00000.safetensors"
    shard.parent.mkdir()
    part = shard.with_name(f".{shard.name}.part")
    with part.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(EnvironmentUnfit, match=r"holds .*00000.*\n.*fuser"),
            cache.filling(shard, 10),
        ):
            pass
    with cache.filling(shard, 10) as file:  # its holder is gone
        os.write(file, bytes(10))
    assert shard.read_bytes() == bytes(10)


def test_a_cache_that_a_stuck_download_fills_is_not_waited_for_endlessly(cache: Cache) -> None:
    home = cache.home(DIGEST)
    home.mkdir()
    with (home / ".00001.safetensors.part").open("wb") as other:
        other.truncate(95)
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(EnvironmentUnfit, match="written nothing"),
            cache.filling(home / "00000.safetensors", 10),
        ):
            pass
