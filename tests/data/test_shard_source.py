"""Samples come out of shards as they went in; of damaged ones, none comes out."""

import json
import os
import shutil

import numpy
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from paceline.data.shards import index
from paceline.data.shards import mmap as mapped
from paceline.data.shards.address_space import period_of
from paceline.data.shards.index import INDEX, DatasetIndex
from paceline.errors import ConfigError, DataError
from paceline.tensorfile import Spec, plan_in_order
from support.datasets import make_dataset, open_folder, rows_of, text_of


def gathered(source, samples):
    return source.gather(numpy.array(samples, dtype=numpy.int64), (0, 0))


@pytest.mark.parametrize(("samples", "per_shard"), [(1, 1), (20, 20), (21, 20), (100, 1)])
def test_samples_come_out_as_they_went_in(tmp_path, samples, per_shard):
    source = open_folder(make_dataset(tmp_path, samples, per_shard))
    order = numpy.random.default_rng(1).permutation(samples)
    image, label = gathered(source, order)
    assert label.tolist() == order.tolist()
    assert (image.numpy() == rows_of(0, samples)["image"][order]).all()
    assert image.dtype == torch.uint8
    assert len(source) == samples
    for missing in ([-1], [0, samples], [0, 10**9]):
        with pytest.raises(IndexError, match=f"of {samples}"):
            gathered(source, missing)


@pytest.mark.parametrize(
    ("samples", "per_shard", "sizes"),
    [
        (25, 7, (784, 8)),
        (25, 7, (3, 5, 9)),  # the third cannot begin at a multiple of 9
        (25, 7, (0, 65536)),
        (25, 7, (2050, 6, 1)),
        (436, 109, (8, 207, 399, 267)),  # without a common period
    ],
)
def test_columns_of_any_sizes_come_out_whole(tmp_path, samples, per_shard, sizes):
    random = numpy.random.default_rng(2)
    rows = {str(size): random.integers(0, 256, (samples, size), dtype="uint8") for size in sizes}

    def part(first, last):
        return {name: values[first:last] for name, values in rows.items()}

    source = open_folder(make_dataset(tmp_path, samples, per_shard, part))
    order = random.permutation(samples)
    for found, wanted in zip(gathered(source, order), rows.values(), strict=True):
        assert (found.numpy() == wanted[order]).all()
    assert source._shards.in_rows == (sizes != (3, 5, 9)) or samples > 25


def test_a_set_that_would_take_too_many_addresses_is_read_bytewise():
    assert period_of([511 * 511 * 3], [32_000_000] * 100) is not None
    assert period_of([511 * 511 * 3], [32_000_000] * 32_000) is None


def test_no_more_shards_are_mapped_than_a_process_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "_MOST_OPEN", 3)
    source = open_folder(make_dataset(tmp_path, 25, 5))
    for number in [0, 5, 10, 15, 20, 0]:
        assert gathered(source, [number])[1].tolist() == [number]
        assert len(source._shards.open) <= 3
    assert gathered(source, range(25))[1].tolist() == list(range(25))


def test_a_fork_reads_though_a_thread_of_its_parent_was_reading(tmp_path):
    source = open_folder(make_dataset(tmp_path, 25, 10))
    with source._lock:
        if (child := os.fork()) == 0:
            os._exit(0 if gathered(source, [7])[1].tolist() == [7] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_samples_before_the_sums_are_refused(tmp_path):
    folder = make_dataset(tmp_path, 6, 6)
    path = folder / "00000.safetensors"
    tensors = load_file(path)
    specs = [
        Spec("label", "I64", (6,)),
        Spec("__xxh3__", "U64", (1,)),
        Spec("image", "U8", (6, 3, 4)),
    ]
    image = plan_in_order(specs, None, aligned=0, align=64)
    content = bytearray(image.size_bytes)
    content[: len(image.header)] = image.header
    for place in image.places:
        content[place.begin : place.end] = tensors[place.spec.name].tobytes()
    head = image.places[1].end
    content[image.places[1].begin : head] = xxhash.xxh3_64_intdigest(content[head:]).to_bytes(
        8, "little"
    )
    path.write_bytes(content)
    sums = xxhash.xxh3_64_hexdigest(content[:head]), xxhash.xxh3_64_hexdigest(content)
    facts = index.ShardFacts("00000.safetensors", 6, len(content), head, *sums)
    columns = DatasetIndex.from_json((folder / INDEX).read_bytes(), "").columns
    (folder / INDEX).write_bytes(DatasetIndex(columns, 6, (facts,)).to_json())
    with pytest.raises(DataError, match="before the checksums"):
        open_folder(folder)[3]


def test_columns_can_be_chosen(tmp_path):
    source = open_folder(make_dataset(tmp_path, 7, 4), ["label"])
    assert [value.tolist() for value in gathered(source, [5])] == [[5]]
    with pytest.raises(ConfigError, match="use one of: image, label"):
        open_folder(tmp_path, ["labels"])


def test_samples_of_varying_length(tmp_path):
    source = open_folder(make_dataset(tmp_path, 23, 4, text_of))
    assert [source[number][0].tolist() for number in range(23)] == [
        [number] * (number % 5) for number in range(23)
    ]
    assert source[-1][0].tolist() == [22, 22]
    with pytest.raises(IndexError):
        source[23]
    with pytest.raises(ConfigError, match="one by one"):
        gathered(source, [1])


def test_items_larger_than_a_leaf(tmp_path, monkeypatch):
    for module in (index, mapped, __import__("paceline.data.shards.shard", fromlist=["x"])):
        monkeypatch.setattr(module, "LEAF_BYTES", 5)
    source = open_folder(make_dataset(tmp_path, 30, 7))
    assert gathered(source, [29, 3])[0].tolist() == rows_of(0, 30)["image"][[29, 3]].tolist()
    assert source._shards.unverified > 0


def test_only_what_is_read_is_summed(tmp_path):
    source = open_folder(make_dataset(tmp_path, 30, 10))
    gathered(source, [3])
    damage(tmp_path / "00002.safetensors", -1)
    gathered(source, [15])
    with pytest.raises(DataError, match=r"00002\.safetensors is damaged"):
        gathered(source, [25])


def pipe(path):
    """Put a pipe in place of a file: who opens it waits for ever."""
    path.unlink()
    os.mkfifo(path)


def damage(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "00001"),
        (lambda path: os.truncate(path, 100), "00001.*damaged"),
        (lambda path: path.write_bytes(b""), "00001.*damaged"),
        (lambda path: shutil.copy(path.with_name("00000.safetensors"), path), "head"),
        (lambda path: damage(path, 7), "head"),  # its length: about 2^60 bytes
        (lambda path: damage(path, 40), "head"),
        (pipe, "not a plain file"),
        (lambda path: pipe(path.with_name(INDEX)), "not a plain file"),
        (lambda path: os.truncate(path.with_name(INDEX), 1 << 41), "bytes; the limit is"),
        (lambda path: path.with_name(INDEX).unlink(), "data pack"),
        (lambda path: path.with_name(INDEX).write_bytes(b"{" * 100_000), "index"),
    ],
)
def test_damaged_sets_are_refused_by_name(tmp_path, harm, words):
    harm(make_dataset(tmp_path, 30, 10) / "00001.safetensors")
    with pytest.raises(DataError, match=words):
        gathered(open_folder(tmp_path), range(30))


@pytest.mark.parametrize(
    ("of_shard", "change"),
    [
        (False, {"version": 2}),
        (False, {"version": None}),
        (False, {"format": "other"}),
        (False, {"columns": []}),
        (False, {"columns": [{"name": "a", "dtype": "U9", "shape": [], "varying": False}]}),
        (
            False,
            {"columns": [{"name": "a", "dtype": "U8", "shape": [2**60] * 2, "varying": False}]},
        ),
        (False, {"columns": [{"name": "a", "dtype": "U8", "shape": [-1], "varying": False}]}),
        (False, {"columns": [{"name": "../a", "dtype": "U8", "shape": [], "varying": False}]}),
        (False, {"samples_per_shard": 0}),
        (False, {"samples_per_shard": 1.5}),
        (False, {"samples_per_shard": 2**70}),
        (False, {"shards": []}),
        (False, {"shards": "x"}),
        (False, {"about": 3}),
        (True, {"name": "../../etc/passwd"}),
        (True, {"name": "x.safetensors"}),
        (True, {"samples": 9}),
        (True, {"samples": True}),
        (True, {"head_bytes": 2**61}),
        (True, {"head_bytes": -1}),
        (True, {"size_bytes": 1}),
    ],
)
def test_an_index_that_cannot_be_is_refused_even_with_a_right_sum(tmp_path, of_shard, change):
    tree = json.loads((make_dataset(tmp_path, 30, 10) / INDEX).read_bytes())
    (tree["shards"][0] if of_shard else tree).update(change)
    tree["xxh3"] = index._checksum({key: value for key, value in tree.items() if key != "xxh3"})
    with pytest.raises(DataError, match="pack or download"):
        DatasetIndex.from_json(json.dumps(tree).encode(), "somewhere")


@settings(max_examples=40)
@given(st.data())
def test_no_flipped_bit_ever_becomes_a_sample(tmp_path_factory, data):
    folder = make_dataset(
        tmp_path_factory.mktemp("set"), 11, 4, data.draw(st.sampled_from([rows_of, text_of]))
    )
    files = sorted(folder.iterdir())
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(DataError, match=path.name.replace(".", r"\.")):  # noqa: PT012
        source = open_folder(folder)
        for number in range(len(source)):
            source[number]
