"""No byte of a set can be other than it was written without being told, with its file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.pack import PackRequest, pack, pack_samples
from paceline.data.pack.shard_writer import shard_name
from paceline.data.shards.check import check_dataset
from paceline.data.shards.index import INDEX, DatasetIndex
from paceline.data.shards.shard import Varying, write_shard
from support import packable


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with a tokenizer beside three shards of samples that vary in length."""
    folder = tmp_path_factory.mktemp("set")
    (folder / "source").mkdir()
    request = packable.token_files(folder / "source").request
    pack(PackRequest(**vars(request) | {"shard_bytes": 1}), folder / "set", workers=1)
    return folder / "set"


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    return shutil.copytree(packed, tmp_path / "set")


@settings(max_examples=100)
@given(data=st.data())
def test_every_byte_counts_and_its_file_is_named(packed: Path, data: st.DataObject) -> None:
    names = sorted(path.name for path in packed.iterdir())
    assert len(names) == 5
    path = packed / data.draw(st.sampled_from(names))
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = data.draw(st.integers(1, 255))
    try:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ changed]) + whole[place + 1 :])
        assert {problem.file for problem in check_dataset(packed).problems} == {path.name}
    finally:
        path.write_bytes(whole)
    assert check_dataset(packed).ok


def spread(index: Path) -> None:
    """Say the same with more space."""
    index.write_text(json.dumps(json.loads(index.read_bytes()), indent=3))


def enlarge_header(shard: Path) -> None:
    shard.write_bytes((1 << 60).to_bytes(8, "little") + shard.read_bytes()[8:])


def other_shard(path: Path) -> None:
    shutil.copy(path.with_name("00000.safetensors"), path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_text("{}")


SHARD = "00001.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        (SHARD, Path.unlink, "missing"),
        (SHARD, lambda path: os.truncate(path, 99), "99 bytes"),
        (SHARD, other_shard, "bytes"),
        (SHARD, enlarge_header, "header"),
        (SHARD, folder_instead, ""),
        ("tokenizer.json", Path.unlink, "missing"),
        ("tokenizer.json", empty, "changed"),
        (INDEX, Path.unlink, "no index.json"),
        (INDEX, empty, "paceline-shards"),
        (INDEX, spread, "changed"),
    ],
)
def test_damage_is_told_with_its_file(file: str, damage, said: str, folder: Path) -> None:
    damage(folder / file)
    (problem,) = check_dataset(folder).problems
    assert problem.file == file
    assert said in problem.what


def test_all_problems_are_told_not_the_first_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    shutil.copy(folder / "00000.safetensors", folder / "00009.safetensors")
    heard: list[tuple[str, int, int]] = []
    verdict = check_dataset(folder, lambda *said: heard.append(said))
    assert (verdict.ok, verdict.strays) == (True, ["00009.safetensors", "notes.txt"])
    assert [said[1:] for said in heard] == [(number, 3) for number in (1, 2, 3)]
    (folder / "00000.safetensors").unlink()
    os.truncate(folder / "00002.safetensors", 10)
    found = [problem.file for problem in check_dataset(folder).problems]
    assert found == ["00000.safetensors", "00002.safetensors"]


def test_an_index_cannot_have_files_outside_of_the_folder_read(folder: Path) -> None:
    index = DatasetIndex.from_json((folder / INDEX).read_bytes(), INDEX)
    outside = xxhash.xxh3_64_hexdigest(b"secret")
    (folder.parent / "secret").write_bytes(b"secret")
    about = {
        "files": {"../secret": outside, "tokenizer.json": index.about["files"]["tokenizer.json"]}
    }
    changed = DatasetIndex(index.columns, index.samples_per_shard, index.shards, about)
    (folder / INDEX).write_bytes(changed.to_json())
    assert check_dataset(folder).ok


@pytest.mark.parametrize(
    "offsets", [[0, 2, 1, 3], [1, 1, 2, 3], [0, 1, 2, 4], [0, -1, 2, 3], [0, 1, 2, 2]]
)
def test_offsets_must_rise_from_the_first_element_to_the_last_even_if_all_sums_are_right(
    offsets: list[int], tmp_path: Path
) -> None:
    index = pack_samples([{"x": b"a"}, {"x": b"b"}, {"x": b"c"}], tmp_path / "set")
    wrong = {"x": Varying(numpy.frombuffer(b"abc", dtype="uint8"), numpy.array(offsets))}
    facts = write_shard(tmp_path / "set", shard_name(0), index.columns, wrong)
    (tmp_path / "set" / INDEX).write_bytes(
        DatasetIndex(index.columns, index.samples_per_shard, (facts,)).to_json()
    )
    (problem,) = check_dataset(tmp_path / "set").problems
    assert problem == ("00000.safetensors", "the offsets of x do not increase from 0 to 3")


def test_every_leaf_that_is_wrong_is_told(tmp_path: Path) -> None:
    pack_samples([{"x": numpy.zeros(700_000, dtype="uint8")}], tmp_path / "set")
    path = tmp_path / "set" / "00000.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1], whole[5000] = 1, 1
    path.write_bytes(whole)
    told = [problem.what for problem in check_dataset(tmp_path / "set").problems]
    assert len(told) == 3
    assert told[0].endswith("have changed since it was written")
    assert told[2] == "its checksum does not match the index"
