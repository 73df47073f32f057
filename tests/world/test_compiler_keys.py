"""torch's hash of its sources is kept, and computed again when a file has changed; it is the one that torch computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.world.compiler_keys import begin_triton_key, reuse_torch_key, state_of_sources

TWICE = """
import sys
from pathlib import Path
from torch._inductor import codecache
from paceline.world.compiler_keys import reuse_torch_key

folder = Path(sys.argv[1])
reuse_torch_key(folder)
computed = codecache.torch_key()
codecache.torch_key.clear()

def refuse(*_):
    raise RuntimeError("torch read its sources again")

codecache.build_code_hash = refuse
reuse_torch_key(folder)
print(codecache.torch_key() == computed)
reuse_torch_key(folder)  # torch has it already
"""


def test_the_second_start_gets_the_hash_without_reading_the_sources(tmp_path: Path) -> None:
    words = [sys.executable, "-c", TWICE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert [path.name for path in tmp_path.iterdir()] == ["torch-key.json"]


class Codecache:
    """What is known of torch's hash in a process that has not compiled yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: bytes | None = None
        monkeypatch.setattr("torch._inductor.codecache.torch_key", self)

    def __call__(self) -> bytes:
        return b"computed"

    def set(self, key: bytes) -> None:
        self.given = key


def test_torch_that_has_changed_computes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_key = Codecache(monkeypatch)
    state = ["before"]
    monkeypatch.setattr("paceline.world.compiler_keys.state_of_sources", lambda _: state[0])
    reuse_torch_key(tmp_path)
    assert torch_key.given is None
    reuse_torch_key(tmp_path)
    assert torch_key.given == b"computed"
    state[0], torch_key.given = "after", None
    reuse_torch_key(tmp_path)
    assert torch_key.given is None
    assert json.loads((tmp_path / "torch-key.json").read_text())["sources"] == "after"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '"key"',
        "[" * 100_000,
        '{"sources": "now"}',
        '{"sources": "now", "key": 3}',
        '{"sources": "now", "key": "no hex"}',
    ],
)
def test_a_damaged_file_is_written_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_key = Codecache(monkeypatch)
    monkeypatch.setattr("paceline.world.compiler_keys.state_of_sources", lambda _: "now")
    (tmp_path / "torch-key.json").write_text(text)
    reuse_torch_key(tmp_path)
    assert torch_key.given is None
    reuse_torch_key(tmp_path)
    assert torch_key.given == b"computed"


def rewrite(path: Path) -> None:
    path.write_text("2")
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize(
    "change",
    [
        rewrite,
        lambda path: path.write_text("longer"),
        Path.unlink,
        lambda path: path.with_name("new.so").touch(),
        lambda path: path.rename(path.with_name("renamed.py")),
    ],
    ids=["time", "size", "removed", "added", "renamed"],
)
def test_every_change_of_a_source_is_seen(change: Callable[[Path], object], tmp_path: Path) -> None:
    source = tmp_path / "deep" / "er" / "file.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    os.utime(source, ns=(0, 0))
    before = state_of_sources(tmp_path)
    for unread in ("notes.txt", "include/header.cpp", "__pycache__/file.so"):
        (source.parent / unread).parent.mkdir(exist_ok=True)
        (source.parent / unread).touch()
    assert state_of_sources(tmp_path) == before
    change(source)
    assert state_of_sources(tmp_path) != before


def test_a_linked_folder_or_a_dangling_link_leaves_the_hash_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_key = Codecache(monkeypatch)
    torch, kept = tmp_path / "torch", tmp_path / "kept"
    torch.mkdir()
    kept.mkdir()
    monkeypatch.setattr("torch.__file__", str(torch / "__init__.py"))
    for target in (kept, tmp_path / "nowhere"):
        (torch / "linked.py").symlink_to(target)
        reuse_torch_key(kept)
        (torch / "linked.py").unlink()
    assert list(kept.iterdir()) == []
    assert torch_key.given is None


def test_another_version_of_torch_or_no_triton_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch._inductor.runtime.triton_compat.triton_key", raising=False)
    begin_triton_key()
    monkeypatch.setattr("paceline.world.compiler_keys.state_of_sources", lambda _: "now")
    monkeypatch.setattr("torch._inductor.codecache.torch_key", lambda: b"computed")
    for _ in range(2):
        reuse_torch_key(tmp_path)


def test_the_hash_of_triton_is_computed_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    monkeypatch.setattr(
        "torch._inductor.runtime.triton_compat.triton_key",
        lambda: computed.append(threading.current_thread().name),
        raising=False,  # there is none without Triton
    )
    begin_triton_key()
    for thread in threading.enumerate():
        if thread.name == "triton key":
            thread.join()
    assert computed == ["triton key"]
