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
    draw,
    facts_of,
    preview_of,
    read_sample,
    summarize,
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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (packable.text_bytes, packable.JOINED[:8]),
        (packable.text_files, packable.TEXTS["a.txt"]),
        (packable.characters, packable.JOINED[:6]),
        (packable.token_files, packable.TEXTS["a.txt"]),
    ],
)
def test_a_text_is_decoded(kind, text: str, source: Path, tmp_path: Path) -> None:
    pack(kind(source).request, tmp_path / "out", workers=1)
    assert shown(tmp_path / "out")["tokens"] == ("tokens", text, None)


def test_tokens_are_numbers_where_the_package_is_missing(
    source: Path, tmp_path: Path, monkeypatch
) -> None:
    pack(packable.token_files(source).request, tmp_path / "out", workers=1)

    def find_nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(extras.importlib, "import_module", find_nothing)
    assert re.fullmatch(r"[\d …]+ \(.*\)", shown(tmp_path / "out")["tokens"].words)


@pytest.mark.parametrize("kind", [packable.images, packable.grey_images, packable.image_files])
def test_an_image_is_a_picture_whether_decoded_or_not(kind, source: Path, tmp_path: Path) -> None:
    pack(kind(source).request, tmp_path / "out", workers=1)
    found = shown(tmp_path / "out", 5)
    assert numpy.array_equal(found["image"].picture, numpy.full((4, 6, 3), 180))
    assert found["label"] == ("label", "1", None)


@pytest.mark.parametrize(
    ("value", "picture"),
    [
        (numpy.zeros((3, 9, 8), dtype="uint8"), (9, 8, 3)),
        (numpy.zeros((1, 9, 8), dtype="uint8"), (9, 8, 3)),
        (numpy.zeros((9, 8, 4), dtype="uint8"), (9, 8, 3)),
        (numpy.zeros((9, 8, 5), dtype="uint8"), None),
        (numpy.zeros((2, 8), dtype="uint8"), None),
        (numpy.zeros((9, 8), dtype="float32"), None),
        (numpy.zeros(72, dtype="uint8"), None),
        (numpy.zeros((9, 0), dtype="uint8"), None),
    ],
)
def test_what_is_taken_for_a_picture(value, picture, tmp_path: Path) -> None:
    pack_samples([{"x": value}], tmp_path / "out")
    found = shown(tmp_path / "out")["x"].picture
    assert (found if found is None else found.shape) == picture


def test_bytes_that_are_neither_text_nor_image_are_numbers(tmp_path: Path) -> None:
    pack_samples([{"x": b"\xff\0\x80"}, {"x": b""}], tmp_path / "out")
    assert (shown(tmp_path / "out")["x"].words, shown(tmp_path / "out", 1)["x"].words) == (
        "255 0 128",
        "",
    )


def test_samples_of_every_shard_are_found(tmp_path: Path) -> None:
    pack_samples([{"x": n, "word": "a" * n} for n in range(10)], tmp_path / "out", shard_bytes=60)
    assert [shown(tmp_path / "out", n)["x"].words for n in range(10)] == [str(n) for n in range(10)]
    assert [shown(tmp_path / "out", n)["word"].words for n in range(10)] == [
        "a" * n for n in range(10)
    ]
    with pytest.raises(ConfigError, match="sample must be 0 to 9, got 10") as error:
        shown(tmp_path / "out", 10)
    assert error.value.fix == "pass a number from 0 to 9"


def test_a_damaged_shard_is_not_shown(tmp_path: Path) -> None:
    pack_samples([{"x": 1}], tmp_path / "out")
    path = tmp_path / "out" / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="00000.safetensors is damaged"):
        shown(tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match="cannot read .*00000.safetensors"):
        shown(tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (numpy.array(3.14159), "3.142"),
        (numpy.array([True, False]), "True False"),
        (numpy.array([], dtype="int8"), "empty"),
        (numpy.array([1 + 2j] * 13), "1+2j " * 5 + "1+2j … " + "1+2j " * 5 + "1+2j  ([13])"),
        (
            numpy.array([float("nan")] * 13),
            "nan " * 5 + "nan … " + "nan " * 5 + "nan  ([13], nan to nan)",
        ),
    ],
)
def test_numbers_are_said_in_short(value, words: str) -> None:
    assert summarize(value) == words


def test_types_that_numpy_does_not_have_are_shown_as_something_near() -> None:
    assert _numbers(Column("x", "BF16", (2,)), memoryview(b"\x80\x3f\x00\xc0")).tolist() == [
        1.0,
        -2.0,
    ]
    assert _numbers(Column("x", "F8_E4M3", (2,)), memoryview(b"\x01\xff")).tolist() == [1, 255]


STEPS = numpy.repeat(numpy.array([[0, 64, 128, 255]] * 4, dtype="uint8")[:, :, None], 3, axis=2)


@pytest.mark.parametrize(
    ("colours", "line"),
    [
        ("none", " :+@"),
        ("grey", "".join(f"\x1b[38;5;{n};48;5;{n}m▀" for n in (232, 238, 244, 255)) + "\x1b[0m"),
        (
            "24-bit",
            "".join(f"\x1b[38;2;{n};{n};{n};48;2;{n};{n};{n}m▀" for n in (0, 64, 128, 255))
            + "\x1b[0m",
        ),
    ],
)
def test_a_picture_is_drawn_two_rows_a_line(colours, line: str) -> None:
    assert draw(STEPS, 80, colours) == [line, line]


@pytest.mark.parametrize(
    ("height", "width", "room", "lines", "columns"),
    [(100, 100, 30, 13, 25), (5, 7, 80, 3, 7), (4, 400, 80, 1, 80), (400, 4, 80, 40, 1)],
)
def test_a_picture_is_made_as_small_as_it_must(
    height: int, width: int, room: int, lines: int, columns: int
) -> None:
    drawn = draw(numpy.full((height, width, 3), 255, dtype="uint8"), room, "none")
    assert (len(drawn), max(map(len, drawn))) == (lines, columns)


def test_facts_are_those_of_the_index(tmp_path: Path) -> None:
    index = pack_samples([{"x": 1, "word": "a"}] * 3, tmp_path / "out", about={"by": "me"})
    facts = facts_of(index)
    assert facts["columns"] == [
        {"name": "x", "type": "int64", "shape": [], "varying": False},
        {"name": "word", "type": "uint8", "shape": [], "varying": True},
    ]
    assert (facts["samples"], facts["shards"], facts["about"]) == (3, 1, {"by": "me"})
    assert facts["size_bytes"] == (tmp_path / "out" / "00000.safetensors").stat().st_size
