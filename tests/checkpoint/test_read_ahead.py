"""The newest checkpoint is read while a script builds its model: once, and with the same care as later."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.checkpoint import read_ahead
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.read_ahead import ReadAhead
from paceline.checkpoint.restore import newest_good, read_tensors
from paceline.world.world import World
from support.checkpoint_contents import bits_of, flip, part_of, save, tensors_of
from support.checkpoint_trainings import cut, settings, train


class Counting(LocalStorage):
    """Counts how often each file is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[int] = Counter()

    def chunks(self, step, name, *, cached=True):
        self.reads[step] += 1
        return super().chunks(step, name, cached=cached)


@pytest.fixture
def storage(tmp_path: Path) -> Counting:
    found = Counting(tmp_path)
    for step in (1, 2):
        save(found, step, tensors_of(step))
    return found


def restored(storage: Counting, ahead: ReadAhead | None) -> tuple[int, dict[str, str], list[str]]:
    told: list[str] = []
    found = newest_good(storage, World(), lambda _, why: told.append(why), ahead=ahead)
    assert found is not None
    tensors = {name: value.clone() for name, value in read_tensors(storage, found, ahead)}
    return found.step, bits_of(tensors), told


def test_a_file_is_read_once_instead_of_twice(storage) -> None:
    expected = 2, bits_of(tensors_of(2)), []
    assert restored(storage, None) == expected
    assert storage.reads == {2: 2}
    storage.reads.clear()
    assert restored(storage, ReadAhead(storage, 0, 1)) == expected
    assert storage.reads == {2: 1}


def test_a_resumed_run_reads_its_checkpoint_once(tmp_path, monkeypatch) -> None:
    config, steps = settings(tmp_path), []
    cut(config, 7)
    chunks = LocalStorage.chunks

    def counted(self, step, name, *, cached=True):
        steps.append(step)
        return chunks(self, step, name, cached=cached)

    monkeypatch.setattr(LocalStorage, "chunks", counted)
    train(config)
    assert steps.count(5) == 1  # the one it was resumed from


def test_a_damaged_file_is_found_and_the_checkpoint_before_it_used(storage, tmp_path) -> None:
    flip(part_of(tmp_path, 2))
    step, bits, told = restored(storage, ReadAhead(storage, 0, 1))
    assert (step, bits) == (1, bits_of(tensors_of(1)))
    assert "other bytes than were written" in told[0]


def test_bytes_of_another_file_are_not_used(storage) -> None:
    ahead, manifest = ReadAhead(storage, 0, 1), storage.manifest(2)
    [(name, facts)] = manifest.files.items()
    content = ahead.get(2, name, facts)
    assert content is not None
    assert len(content) == facts.size_bytes
    assert ahead.get(2, name, replace(facts, xxh3="0" * 16)) is None
    assert ahead.get(1, name, facts) is None
    ahead.clear()
    assert ahead.get(2, name, facts) is None


def test_a_file_that_is_too_large_is_read_when_it_is_needed(storage, monkeypatch) -> None:
    monkeypatch.setattr(read_ahead, "_MAX_BYTES", 100)
    ahead = ReadAhead(storage, 0, 1)
    assert restored(storage, ahead) == (2, bits_of(tensors_of(2)), [])
    assert storage.reads == {2: 2}


@pytest.mark.parametrize("root", ["empty", "no-such-folder"])
def test_without_a_checkpoint_nothing_is_read(root, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    storage = Counting(tmp_path / root)
    ahead = ReadAhead(storage, 0, 1)
    assert newest_good(storage, World(), lambda *_: None, ahead=ahead) is None
    assert not storage.reads
