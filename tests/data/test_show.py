"""A sample is shown as what it is: numbers, a text, a picture."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest

from paceline.data.pack import optional_packages as extras
from paceline.data.pack import pack, pack_samples
from paceline.data.shards.check import open_index
from paceline.data.shards.index import Column
from paceline.data.shards.show import (
    Preview,
    _numbers,
    preview_of,
    read_sample,
)
from paceline.errors import ConfigError, DataError
from support import packable


def shown(folder: Path, number: int = 0) -> dict[str, Preview]:
    index = open_index(folder)
    sample = read_sample(folder, index, number)
    return {
        column.name: preview_of(folder, index, column, sample[column.name])
        for column in index.columns
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.mark.parametrize("kind", ["text_bytes", "text_files", "characters", "token_files"])
def test_a_text_is_decoded(kind: str, source: Path, tmp_path: Path, monkeypatch) -> None:
    pack(getattr(packable, kind)(source).request, tmp_path / "out", workers=1)
    length = {"text_bytes": 8, "characters": 6}.get(kind, len(packable.TEXTS["a.txt"]))
    assert shown(tmp_path / "out")["tokens"] == ("tokens", packable.JOINED[:length], None)
    if kind == "token_files":  # which are numbers where the package is missing
        monkeypatch.setattr(extras.importlib, "import_module", find_nothing)
        assert re.fullmatch(r"[\d …]+ \(.*\)", shown(tmp_path / "out")["tokens"].words)


def find_nothing(name: str) -> None:
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("kind", [packable.images, packable.grey_images, packable.image_files])
def test_an_image_is_a_picture_whether_decoded_or_not(kind, source: Path, tmp_path: Path) -> None:
    pack(kind(source).request, tmp_path / "out", workers=1)
    found = shown(tmp_path / "out", 5)
    assert numpy.array_equal(found["image"].picture, numpy.full((4, 6, 3), 180))
    assert found["label"] == ("label", "1", None)


@pytest.mark.parametrize(
    ("shape", "dtype", "picture"),
    [
        ((3, 9, 8), "uint8", (9, 8, 3)),
        ((1, 9, 8), "uint8", (9, 8, 3)),
        ((9, 8, 4), "uint8", (9, 8, 3)),
        ((9, 8, 5), "uint8", None),
        ((2, 8), "uint8", None),
        ((9, 8), "float32", None),
        ((9, 0), "uint8", None),
    ],
)
def test_what_is_taken_for_a_picture(shape, dtype, picture, tmp_path: Path) -> None:
    pack_samples([{"x": numpy.zeros(shape, dtype)}], tmp_path / "out")
    found = shown(tmp_path / "out")["x"].picture
    assert (found if found is None else found.shape) == picture


def test_samples_of_every_shard_are_found(tmp_path: Path) -> None:
    pack_samples([{"x": n, "word": "a" * n} for n in range(10)], tmp_path / "out", shard_bytes=60)
    found = [shown(tmp_path / "out", n) for n in range(10)]
    assert [one["x"].words for one in found] == [str(n) for n in range(10)]
    assert [one["word"].words for one in found] == ["a" * n for n in range(10)]
    with pytest.raises(ConfigError, match="0 to 9.*10"):
        shown(tmp_path / "out", 10)


def test_a_damaged_shard_is_not_shown(tmp_path: Path) -> None:
    pack_samples([{"x": 1}], tmp_path / "out")
    path = tmp_path / "out" / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="00000.safetensors is damaged"):
        shown(tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match="00000.safetensors"):
        shown(tmp_path / "out")


def test_types_that_numpy_does_not_have_are_shown_as_something_near() -> None:
    assert _numbers(Column("x", "BF16", (2,)), memoryview(b"\x80\x3f\x00\xc0")).tolist() == [
        1.0,
        -2.0,
    ]
    assert _numbers(Column("x", "F8_E4M3", (2,)), memoryview(b"\x01\xff")).tolist() == [1, 255]
