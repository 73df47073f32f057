"""Shards in an object store: a real S3 API on this machine, and a file system that fails when it is told to."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto import settings as moto_settings

from paceline.data.shards import cache as cache_module
from paceline.data.shards import remote_store as remote
from paceline.data.shards.cache import Cache
from paceline.data.shards.index import INDEX, DatasetIndex
from paceline.data.shards.remote_store import RemoteShardStore, open_store
from paceline.data.shards.shard import column_of, write_shard
from paceline.data.shards.source import ShardSource
from paceline.data.shards.store import LocalShardStore
from paceline.errors import ConfigError, DataError, EnvironmentUnfit
from paceline.objectstore import Unreachable
from support.datasets import open_folder
from support.s3_server import (  # noqa: F401 - fixtures
    SECRET,
    bucket,
    change,
    client,
    env,
    flipped,
    server,
)

SAMPLES = 40
LARGE = 1 << 40


def pack(folder: Path, shards: int = 4, seed: int = 0) -> DatasetIndex:
    """Write a small set, with numbers for bytes."""
    folder.mkdir()
    draw = numpy.random.default_rng(seed)
    rows = [{"x": draw.integers(0, 256, (SAMPLES, 100), dtype=numpy.uint8)} for _ in range(shards)]
    columns = [column_of("x", rows[0]["x"])]
    facts = [
        write_shard(folder, f"{number:05d}.safetensors", columns, row)
        for number, row in enumerate(rows)
    ]
    index = DatasetIndex(tuple(columns), SAMPLES, tuple(facts))
    (folder / INDEX).write_bytes(index.to_json())
    return index


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "packed"
    pack(folder)
    return folder


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch) -> None:
    monkeypatch.setattr(remote, "_PAUSES_S", (0, 0, 0))


def upload(client, bucket: str, folder: Path, to: str = "set") -> str:
    for path in folder.iterdir():
        client.put_object(Bucket=bucket, Key=f"{to}/{path.name}", Body=path.read_bytes())
    return f"s3://{bucket}/{to}"


@pytest.fixture
def there(client, bucket, packed, server) -> str:
    """The address of the set, in the store; requests are counted from here on."""
    address = upload(client, bucket, packed)
    server.requests.clear()
    return address


def gets(server) -> Counter[str]:
    """Return how often each object was read."""
    return Counter(
        path.rpartition("/")[2] for method, path, _ in list(server.requests) if method == "GET"
    )


def is_shard(request) -> bool:
    return request[0] == "GET" and request[1].endswith(".safetensors")


def size_of(folder: Path) -> int:
    return (folder / "00000.safetensors").stat().st_size


def names_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("set-*/*"))


class Fickle(MemoryFileSystem):
    """Files in memory, read by a line that fails, or changes bytes, as often as it is told to."""

    protocol = "fickle"
    opened: Counter[str] = Counter()  # noqa: RUF012
    failures = 0
    flips = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("fickle://", "memory://"))

    def _open(self, path, mode="rb", **options):
        content = super()._open(path, mode, **options)
        if mode != "rb":
            return content
        type(self).opened[path.rpartition("/")[2]] += 1
        if path.endswith(".safetensors") and self.failures:
            type(self).failures -= 1
            raise ConnectionResetError("the line is cut")
        if path.endswith(".safetensors") and self.flips:
            type(self).flips -= 1
            return io.BytesIO(flipped(content.read()))
        return content


def to_memory(folder: Path, name: str) -> None:
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/{name}/{path.name}", path.read_bytes())


@pytest.fixture
def fickle(packed, tmp_path, monkeypatch) -> Iterator[str]:
    """The address of the set, in memory."""
    fsspec.register_implementation("fickle", Fickle, clobber=True)
    for name, value in {"opened": Counter(), "failures": 0, "flips": 0}.items():
        monkeypatch.setattr(Fickle, name, value)
    to_memory(packed, tmp_path.name)
    yield f"fickle://{tmp_path.name}"
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("address", ["{}", "file://{}"])
def test_a_path_is_read_where_it_is(address, packed) -> None:
    store = open_store(address.format(packed), "", 0)
    assert isinstance(store, LocalShardStore)
    assert store.fetch(store.index().shards[1]) == packed / "00001.safetensors"


def test_a_set_comes_as_it_was_packed_and_every_object_once(there, server, packed, tmp_path):
    for _ in range(2):
        store = open_store(there + "/", str(tmp_path / "cache"), LARGE)
        assert store.index() == LocalShardStore(packed).index()
        for shard in store.index().shards:
            assert store.fetch(shard).read_bytes() == (packed / shard.name).read_bytes()
    assert gets(server) == {INDEX: 2} | {shard.name: 1 for shard in store.index().shards}
    for path in [*tmp_path.glob("cache/**/*"), tmp_path / "cache"]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


def test_the_cache_is_in_the_home_if_no_folder_is_named(fickle, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store = open_store(fickle, "", LARGE)
    cache = tmp_path / "home" / ".cache" / "paceline" / "shards"
    assert store.fetch(store.index().shards[0]).is_relative_to(cache)


CHILD = """
import json, os, sys
from pathlib import Path
import xxhash
from paceline.data.shards import remote_store as remote

def content(store, shard):
    while True:
        try:
            return store.fetch(shard).read_bytes()
        except FileNotFoundError:
            pass

given = json.loads(sys.argv[1])
shelves = [remote.open_store(address, given["cache"], given["room"]) for address in given["addresses"]]
print("ready", flush=True)
sys.stdin.readline()
"""
NO_TORCH = "\nassert 'torch' not in sys.modules"

ASK_FOR_ALL = """
for round in range(given["rounds"]):
    for store in shelves:
        shards = list(store.index().shards)
        if given["turned"]:
            shards = shards[given["number"]:] + shards[:given["number"]]
        for shard in shards:
            assert xxhash.xxh3_64_hexdigest(content(store, shard)) == shard.xxh3
"""


class Child:
    """A process that reads a set, with words for what it does."""

    def __init__(self, then, addresses, cache, room=LARGE, **given):
        words = {"addresses": addresses, "cache": str(cache), "room": room, **given}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD + then + NO_TORCH, json.dumps(words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def begin(self) -> None:
        assert self._process.stdout.readline() == "ready\n", self._process.stderr.read()
        self.go_on()

    def go_on(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def says(self) -> str:
        return self._process.stdout.readline()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def end(self) -> int:
        try:
            self._process.wait(120)
        finally:
            self._process.kill()
            print(*self._process.communicate())
        return self._process.returncode


def run_together(children: list[Child]) -> None:
    for child in children:
        child.begin()
    codes = [child.end() for child in children]
    assert codes == [0] * len(children)


def test_processes_that_ask_at_once_fetch_every_object_once(there, server, tmp_path) -> None:
    cache, given = tmp_path / "cache", {"rounds": 1, "turned": True}
    run_together([Child(ASK_FOR_ALL, [there], cache, number=n, **given) for n in range(2)])
    assert gets(server) == {INDEX: 2} | {f"{number:05d}.safetensors": 1 for number in range(4)}
    assert names_in(cache) == [f"{number:05d}.safetensors" for number in range(4)]


@contextlib.contextmanager
def watched(cache: Path) -> Iterator[list[int]]:
    """Look, again and again, at how many bytes are in a cache; no file may get its name meanwhile."""
    found: list[int] = []
    over = threading.Event()

    def look() -> None:
        last = False
        while not last:
            last = over.is_set()
            with open(cache / "lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                sizes = []
                for path in cache.glob("set-*/*"):
                    with contextlib.suppress(FileNotFoundError):
                        sizes.append(path.stat().st_size)
                found.append(sum(sizes))

    cache.mkdir(mode=0o700)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@pytest.mark.heavy
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_processes_with_different_sets_share_one_bound_at_every_moment(
    shards, there, client, bucket, tmp_path
) -> None:
    pack(tmp_path / "other", seed=1)
    addresses = [there, upload(client, bucket, tmp_path / "other", "other")]
    room, given = shards * size_of(tmp_path / "other") + 7, {"rounds": 3, "turned": True}
    with watched(tmp_path / "cache") as sizes:
        run_together(
            [
                Child(ASK_FOR_ALL, [addresses[n % 2]], tmp_path / "cache", room, number=n, **given)
                for n in range(3)
            ]
        )
    assert room - size_of(tmp_path / "other") < max(sizes) <= room
    assert not [name for name in names_in(tmp_path / "cache") if name.endswith(".part")]


def test_the_least_recently_used_goes_first_and_a_mapping_lives_on(fickle, packed, tmp_path):
    store = open_store(fickle, str(tmp_path / "cache"), 3 * size_of(packed))
    first, second, third, fourth = store.index().shards
    for shard in (first, second, third):
        path = store.fetch(shard)
        if shard == second:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    store.fetch(first)
    store.fetch(fourth)
    assert names_in(tmp_path / "cache") == [first.name, third.name, fourth.name]
    assert mapped[:] == (packed / second.name).read_bytes()
    mapped.close()


def test_a_cache_that_cannot_hold_a_shard_says_how_large_it_must_be(fickle, packed, tmp_path):
    with pytest.raises(ConfigError, match=r"read.cache_gb=0.001") as caught:
        open_store(fickle, str(tmp_path / "cache"), size_of(packed) - 1).index()
    assert f"{size_of(packed):,}" in caught.value.problem
    assert fickle in caught.value.problem


def test_what_downloads_left_is_swept_and_nothing_else_is_touched(fickle, packed, tmp_path) -> None:
    cache = tmp_path / "cache"
    left = [
        cache / f"set-{'0' * 32}" / ".00007.safetensors.part",
        cache / f"set-{'1' * 32}" / "00003.safetensors",
    ]
    names = ["mine/00000.safetensors", "note.txt", "set-of-mine/.x.part"]
    mine = [cache / name for name in names]
    for path in [*left, *mine]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size_of(packed)))
    store = open_store(fickle, str(cache), size_of(packed))
    store.fetch(store.index().shards[0])
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in mine)
    store.fetch(store.index().shards[1])
    assert len([path for path in cache.glob("set-*") if path.name != "set-of-mine"]) == 1


def test_a_download_that_another_process_holds_is_not_waited_for_endlessly(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_PATIENCE_S", 0.2)
    cache = Cache(tmp_path, 100)
    shard = cache.home("0" * 32) / "00000.safetensors"
    shard.parent.mkdir()
    part = shard.with_name(f".{shard.name}.part")
    with part.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentUnfit, match="00000"), cache.filling(shard, 10):
            pass
        other.truncate(95)
        another = shard.with_name("00001.safetensors")
        with pytest.raises(EnvironmentUnfit, match="written nothing"), cache.filling(another, 10):
            pass
    with cache.filling(shard, 10) as file:  # its holder is gone, and what it left takes no room
        os.write(file, bytes(10))
    assert shard.read_bytes() == bytes(10)


def test_a_set_larger_than_the_cache_is_gathered_in_turns(fickle, packed, tmp_path) -> None:
    source = ShardSource(open_store(fickle, str(tmp_path / "cache"), size_of(packed) + 10))
    order = numpy.random.default_rng(0).permutation(4 * SAMPLES)
    assert source.gather(order, (0, 0))[0].equal(open_folder(packed).gather(order, (0, 0))[0])
    kept = (path.stat().st_size for path in (tmp_path / "cache").rglob("*.safetensors"))
    assert sum(kept) <= size_of(packed) + 10


def test_a_set_that_was_changed_is_not_mixed_with_the_old_one(fickle, tmp_path) -> None:
    old = open_store(fickle, str(tmp_path / "cache"), LARGE)
    before = old.fetch(old.index().shards[0])
    pack(tmp_path / "new", seed=1)
    to_memory(tmp_path / "new", tmp_path.name)
    new = open_store(fickle, str(tmp_path / "cache"), LARGE)
    after = new.fetch(new.index().shards[0])
    assert after.parent != before.parent
    assert after.read_bytes() == (tmp_path / "new" / after.name).read_bytes()
    with pytest.raises(DataError, match=r"00001\.safetensors"):
        old.fetch(old.index().shards[1])


@pytest.mark.parametrize("at", [3, -1, None], ids=["head", "samples", "torn"])
def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(at, fickle, packed, tmp_path):
    store, everything = (
        open_store(fickle, str(tmp_path / "cache"), LARGE),
        numpy.arange(4 * SAMPLES),
    )
    path = store.fetch(store.index().shards[1])
    content = bytearray(path.read_bytes())
    if at is None:
        del content[9:]
    else:
        content[at] ^= 4
    path.write_bytes(content)
    found = ShardSource(store).gather(everything, (0, 0))[0]
    assert found.equal(open_folder(packed).gather(everything, (0, 0))[0])
    assert Fickle.opened["00001.safetensors"] == 2
    assert path.read_bytes() == (packed / path.name).read_bytes()


DAMAGE = {
    "a flipped bit": (flipped, "checksum"),
    "a torn object": (lambda content: content[:-7], "bytes instead of"),
    "a longer object": (lambda content: content + b"x", "more than"),
    "an empty object": (lambda content: b"", "0 bytes instead of"),
}


@pytest.mark.parametrize(("how", "why"), DAMAGE.values(), ids=DAMAGE)
def test_damage_in_the_store_is_told_and_never_kept(how, why, fickle, tmp_path) -> None:
    store, memory = open_store(fickle, str(tmp_path / "cache"), LARGE), fsspec.filesystem("memory")
    path = f"/{tmp_path.name}/00001.safetensors"
    memory.pipe_file(path, how(memory.cat_file(path)))
    with pytest.raises(DataError, match=f"{fickle}/00001.safetensors .*{why}"):
        store.fetch(store.index().shards[1])
    assert Fickle.opened["00001.safetensors"] == 4
    assert names_in(tmp_path / "cache") == []
    store.fetch(store.index().shards[0])


@pytest.mark.parametrize(
    "address",
    [
        "s3://{}/set2",
        pytest.param("s3://{}", marks=pytest.mark.heavy),
        pytest.param("s3://no-such-bucket/set", marks=pytest.mark.heavy),
    ],
)
def test_where_there_is_no_set_it_is_told(address, there, bucket, tmp_path) -> None:
    with pytest.raises(DataError, match=address.format(bucket)) as caught:
        open_store(address.format(bucket), str(tmp_path / "cache"), LARGE).index()
    assert "paceline data pack" in caught.value.fix


def test_damaged_and_missing_objects_of_s3_are_told(there, server, client, bucket, tmp_path):
    change(client, bucket, "set/00001.safetensors", flipped)
    client.delete_object(Bucket=bucket, Key="set/00003.safetensors")
    store = open_store(there, str(tmp_path / "cache"), LARGE)
    shards = store.index().shards
    server.requests.clear()
    for number, attempts in ((1, 4), (3, 1)):
        with pytest.raises(DataError, match=f"{there}/{shards[number].name}"):
            store.fetch(shards[number])
        asked = [
            method for method, path, _ in server.requests if path.endswith(shards[number].name)
        ]
        assert asked.count("HEAD") == attempts
    assert names_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("status", "failures"),
    [("503 Slow Down", 2), pytest.param("500 Internal Server Error", 3, marks=pytest.mark.heavy)],
)
def test_a_store_that_fails_at_first_is_asked_again(
    status, failures, there, server, packed, tmp_path
) -> None:
    store = open_store(there, str(tmp_path / "cache"), LARGE)
    shard, left = store.index().shards[0], [None] * failures
    with server.refusing(lambda request: is_shard(request) and left and not left.pop(), status):
        assert store.fetch(shard).read_bytes() == (packed / shard.name).read_bytes()
    assert not left


def test_a_store_that_goes_on_failing_is_unreachable(there, server, tmp_path) -> None:
    store = open_store(there, str(tmp_path / "cache"), LARGE)
    shard = store.index().shards[0]
    with server.refusing(is_shard), pytest.raises(Unreachable, match=f"{there}/00000") as caught:
        store.fetch(shard)
    assert not caught.value.comes_again
    assert caught.value.exit_code == 3
    assert "AWS_ENDPOINT_URL" in caught.value.fix
    assert names_in(tmp_path / "cache") == []
    store.fetch(shard)


def test_a_killed_downloader_leaves_nothing_that_others_would_trust_or_wait_for(
    there, server, packed, tmp_path
) -> None:
    cache = tmp_path / "cache"
    ask = "content(shelves[0], shelves[0].index().shards[1])\nprint('done', flush=True)"
    killed, waiting = (Child(ask, [there], cache) for _ in range(2))
    with server.holding(is_shard):
        killed.begin()
        assert server.came.wait(60), "no download began"
        assert names_in(cache) == [".00001.safetensors.part"]
        waiting.begin()
        server.held = lambda request: False
        killed.kill()
        assert killed.end() == -signal.SIGKILL
        assert waiting.says() == "done\n"
        assert waiting.end() == 0
    assert names_in(cache) == ["00001.safetensors"]
    assert next(cache.glob("set-*/*")).read_bytes() == (packed / "00001.safetensors").read_bytes()


@pytest.mark.parametrize("known", ["no keys", pytest.param("wrong keys", marks=pytest.mark.heavy)])
def test_wrong_credentials_are_an_unfit_environment(known, there, server, tmp_path, monkeypatch):
    if known == "no keys":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
    with pytest.raises(Unreachable, match=f"{there}/index.json") as caught:
        open_store(there, str(tmp_path / "cache"), LARGE).index()
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        ("s3://bucket/set", EnvironmentUnfit, r"(?s)s3://.*pip install 'fsspec\[s3\]'"),
        ("nosuch://place/set", ConfigError, "fsspec"),
        ("s3://user:password@bucket/set", ConfigError, "password"),
        ("sftp://password@host/set", ConfigError, "password"),
    ],
)
def test_an_address_that_cannot_be_opened_says_what_to_do(
    address, error, told, tmp_path, monkeypatch
) -> None:
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(error, match=told) as caught:
        open_store(address, str(tmp_path), LARGE)
    assert "password@" not in str(caught.value)


@pytest.mark.parametrize("in_the_way", ["cache", "cache/lock/x"])
def test_a_cache_that_cannot_be_written_is_told(in_the_way, fickle, tmp_path) -> None:
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).write_text("")
    store = open_store(fickle, str(tmp_path / "cache"), LARGE)
    with pytest.raises(EnvironmentUnfit, match=f"(?s){tmp_path / 'cache'}.*read.cache"):
        store.fetch(store.index().shards[0])


@pytest.mark.heavy
def test_a_forked_process_reads_on(there, tmp_path) -> None:
    fork = """
shards = shelves[0].index().shards
content(shelves[0], shards[0])
child = os.fork()
assert xxhash.xxh3_64_hexdigest(content(shelves[0], shards[2 if child else 1])) == shards[2 if child else 1].xxh3
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run_together([Child(fork, [there], tmp_path / "cache")])


@pytest.mark.parametrize("failures", [0, 3, 4])
@pytest.mark.parametrize(("trouble", "error"), [("failures", Unreachable), ("flips", DataError)])
def test_a_line_that_fails_is_tried_four_times(
    trouble, error, failures, fickle, packed, tmp_path, monkeypatch
) -> None:
    pauses = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    monkeypatch.setattr(remote, "_PAUSES_S", (1, 2, 4))
    store = open_store(fickle, str(tmp_path / "cache"), LARGE)
    shard = store.index().shards[0]
    setattr(Fickle, trouble, failures)
    if failures < 4:
        assert store.fetch(shard).read_bytes() == (packed / shard.name).read_bytes()
    else:
        with pytest.raises(error, match=f"{fickle}/00000.safetensors"):
            store.fetch(shard)
        assert names_in(tmp_path / "cache") == []
    assert Fickle.opened[shard.name] == min(failures + 1, 4)
    assert pauses == [1, 2, 4][:failures]


def test_threads_that_ask_at_once_fetch_every_object_once(fickle, tmp_path) -> None:
    store = open_store(fickle, str(tmp_path / "cache"), LARGE)

    def ask():
        return [store.fetch(shard) for shard in store.index().shards]

    store.index()
    with ThreadPoolExecutor(5) as threads:
        for asked in [threads.submit(ask) for _ in range(5)]:
            asked.result()
    assert set(Fickle.opened.values()) == {1}


def wait_for_the_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "shard-prefetch":
            thread.join(60)


@pytest.mark.parametrize(("shards", "brought"), [(1, 0), (2, 1), (9, 2)])
def test_the_next_few_are_brought_in_the_background(shards, brought, fickle, packed, tmp_path):
    store = RemoteShardStore(fickle, tmp_path / "cache", shards * size_of(packed))
    facts = store.index().shards
    store.prefetch(facts[1:])
    wait_for_the_background()
    names = [shard.name for shard in facts[1 : 1 + brought]]
    assert names_in(tmp_path / "cache") == names
    for shard in facts[1 : 1 + brought]:
        store.fetch(shard)
    assert Fickle.opened == {INDEX: 1} | dict.fromkeys(names, 1)


def test_what_fails_in_the_background_is_told_when_it_is_fetched(fickle, tmp_path) -> None:
    store = RemoteShardStore(fickle, tmp_path / "cache", LARGE)
    shard = store.index().shards[0]
    Fickle.failures = 8
    store.prefetch([shard])
    wait_for_the_background()
    assert Fickle.failures == 4
    with pytest.raises(Unreachable, match="the line is cut"):
        store.fetch(shard)
    store.prefetch([shard])
    wait_for_the_background()
    assert names_in(tmp_path / "cache") == [shard.name]


def test_what_comes_in_the_background_does_not_hold_the_process(there, server, tmp_path) -> None:
    begin = "shelves[0].prefetch(shelves[0].index().shards); print(sys.stdin.readline())"
    child = Child(begin, [there], tmp_path / "cache")
    with server.holding(is_shard):
        child.begin()
        assert server.came.wait(60)
        child.go_on()
        assert child.end() == 0
    store = open_store(there, str(tmp_path / "cache"), LARGE)
    store.fetch(store.index().shards[3])
    assert names_in(tmp_path / "cache") == ["00003.safetensors"]
