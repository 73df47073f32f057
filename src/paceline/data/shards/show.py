"""What a sample of a set looks like: numbers in short, texts decoded, pictures drawn with characters."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy
import xxhash

from paceline.data.pack.optional_packages import import_optional
from paceline.data.safe_open import open_plain
from paceline.data.shards.index import OFFSETS, Column, DatasetIndex
from paceline.data.shards.shard import NUMPY_TYPES, Array, damaged, read_head
from paceline.data.shards.store import read_beside
from paceline.data.vocabulary import vocabulary_of
from paceline.errors import ConfigError, DataError, PacelineError

Colours = Literal["24-bit", "grey", "none"]

_SHADES = " .:-=+*#%@"
_SHOWN = 6  # numbers of an array, from each end
_LEAST_SIDE = 4  # of what is taken for a picture
_TEXT_BYTES = 2_000


class Preview(NamedTuple):
    """One value of a sample: words, or a picture [height, width, 3] of bytes."""

    column: str
    words: str
    picture: Array | None = None


def read_sample(folder: Path, index: DatasetIndex, number: int) -> dict[str, Array]:
    """Return every column of a sample, from a shard of which every byte was summed."""
    if not 0 <= number < index.samples:
        raise ConfigError(
            f"there is no sample {number}", fix=f"give a number from 0 to {index.samples - 1}"
        )
    shard, row = divmod(number, index.samples_per_shard)
    facts = index.shards[shard]
    path = folder / facts.name
    try:
        os.close(open_plain(path))
        content = numpy.memmap(
            path, mode="r"
        ).data  # one sample is shown: the rest need not fit into memory
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise DataError(f"cannot read {path}: {why}", fix="fetch or pack the set again") from error
    if len(content) != facts.size_bytes or xxhash.xxh3_64_hexdigest(content) != facts.xxh3:
        raise damaged(str(path), "its sum is not the one in the index")
    layout = read_head(content[: facts.head_bytes], facts, index.columns, str(path))
    found = {}
    for column in index.columns:
        first, last = row, row + 1
        if column.varying:
            first, last = _span(content, layout.begins[column.name + OFFSETS], row)
        if not 0 <= first <= last <= layout.lengths[column.name]:
            raise damaged(
                str(path), f"sample {row} of {column.name} would lie at {first} to {last}"
            )
        begin = layout.begins[column.name]
        found[column.name] = _numbers(
            column, content[begin + first * column.item_bytes : begin + last * column.item_bytes]
        )
    return found


def _span(content: memoryview, offsets: int, row: int) -> tuple[int, int]:
    first, last = numpy.frombuffer(
        content[offsets + 8 * row : offsets + 8 * row + 16], dtype="<i8"
    ).tolist()
    return first, last


def _numbers(column: Column, content: memoryview) -> Array:
    """Return the elements of one value; of a type that numpy does not have, something near."""
    shape = (-1,) if column.varying else column.shape
    if column.dtype == "BF16":
        return (
            (numpy.frombuffer(content, dtype="<u2").astype("<u4") << 16).view("<f4").reshape(shape)
        )
    name = NUMPY_TYPES.get(column.dtype, "uint8")
    return numpy.frombuffer(content, dtype=numpy.dtype(name).newbyteorder("<")).reshape(shape)


def look(folder: Path, index: DatasetIndex, column: Column, value: Array) -> Preview:
    """Return how a value is best shown."""
    if column.varying or column.name == "tokens":
        picture = _decoded(value) if value.dtype == numpy.uint8 and column.varying else None
        if picture is not None:
            return Preview(column.name, f"an image of {len(value):,} bytes", picture)
        text = _text(folder, index, column, value)
        if text is not None:
            return Preview(column.name, text)
    picture = _as_picture(value)
    return Preview(column.name, in_short(value), picture)


def in_short(value: Array) -> str:
    """Return some numbers of an array, and how far they reach.

    >>> in_short(numpy.array(7)), in_short(numpy.arange(3.0)), in_short(numpy.arange(784).reshape(28, 28))
    ('7', '0 1 2', '0 1 2 3 4 5 … 778 779 780 781 782 783  ([28, 28], 0 to 783)')
    """
    flat = value.reshape(-1)
    if len(flat) <= 2 * _SHOWN:
        return " ".join(_number(one) for one in flat) or "nothing"
    ends = [" ".join(_number(one) for one in part) for part in (flat[:_SHOWN], flat[-_SHOWN:])]
    reach = "" if flat.dtype.kind == "c" else f", {_number(flat.min())} to {_number(flat.max())}"
    return f"{' … '.join(ends)}  ({list(value.shape)}{reach})"


def _number(value: Any) -> str:
    return f"{value:.4g}" if value.dtype.kind in "fc" else str(value)


def _text(folder: Path, index: DatasetIndex, column: Column, value: Array) -> str | None:
    """Return the text that numbers stand for, if they stand for one."""
    about = index.about if column.name == "tokens" else {}
    known = vocabulary_of(about, lambda name: read_beside(folder, name), str(folder))
    if known is None or known.level == "bytes":
        return _bytes_as_text(value, "strict" if known is None else "replace")
    try:
        return known.decode(value.tolist()) if value.max(initial=0) < known.size else None
    except DataError:
        raise
    except PacelineError:
        return None  # the numbers are shown


def _bytes_as_text(value: Array, errors: str) -> str | None:
    if value.dtype != numpy.uint8:
        return None
    try:
        return value.tobytes()[:_TEXT_BYTES].decode(errors=errors)
    except UnicodeDecodeError:
        return None


def _decoded(value: Array) -> Array | None:
    """Return the picture of an image's file, if it is one and there is a package that reads it."""
    try:
        image = import_optional("PIL.Image", "showing images")
    except PacelineError:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)
            with image.open(io.BytesIO(value.tobytes())) as picture:
                return numpy.asarray(picture.convert("RGB"))
    except (
        OSError,
        ValueError,
        SyntaxError,
        image.DecompressionBombError,
        image.DecompressionBombWarning,
    ):
        return None


def _as_picture(value: Array) -> Array | None:
    """Return bytes that have the shape of a picture as one, in colours."""
    if value.dtype != numpy.uint8 or value.ndim not in {2, 3} or value.size == 0:
        return None
    if value.ndim == 2:
        value = value[:, :, None]
    elif value.shape[2] not in {1, 3, 4} and value.shape[0] in {1, 3}:
        value = numpy.moveaxis(value, 0, 2)
    if value.shape[2] not in {1, 3, 4} or min(value.shape[:2]) < _LEAST_SIDE:
        return None
    return numpy.repeat(value, 3, axis=2) if value.shape[2] == 1 else value[:, :, :3]


def draw(picture: Array, width: int, colours: Colours) -> list[str]:
    """Return a picture as lines, two rows of it to a line, as wide as fits."""
    small = _shrunk(picture.astype(float), width)
    if len(small) % 2:
        small = numpy.concatenate([small, numpy.zeros_like(small[:1])])
    pairs = zip(small[::2], small[1::2], strict=True)
    if colours == "none":
        return [
            "".join(_shade((up + low) / 2) for up, low in zip(*pair, strict=True)).rstrip()
            for pair in pairs
        ]
    return [
        "".join(_half(up, low, colours) for up, low in zip(*pair, strict=True)) + "\x1b[0m"
        for pair in pairs
    ]


def _shrunk(picture: Any, most: int) -> Any:
    """Return a picture of at most so many rows and columns, each pixel the mean of a square."""
    side = -(-max(picture.shape[:2]) // max(1, most))
    down, across = (min(side, length) for length in picture.shape[:2])
    height, width = picture.shape[0] // down, picture.shape[1] // across
    cut = picture[: height * down, : width * across]
    return cut.reshape(height, down, width, across, 3).mean(axis=(1, 3))


def _shade(pixel: Any) -> str:
    return _SHADES[min(len(_SHADES) - 1, int(pixel.mean() / 256 * len(_SHADES)))]


def _half(up: Any, low: Any, colours: Colours) -> str:
    """Return a block whose upper half has one colour and whose lower half has another."""
    if colours == "24-bit":
        red, green, blue = (int(value) for value in up)
        return f"\x1b[38;2;{red};{green};{blue};48;2;{int(low[0])};{int(low[1])};{int(low[2])}m▀"
    return f"\x1b[38;5;{232 + int(up.mean() * 24 / 256)};48;5;{232 + int(low.mean() * 24 / 256)}m▀"


def facts_of(index: DatasetIndex) -> Mapping[str, Any]:
    """Return what the index says, without the sums."""
    return {
        "samples": index.samples,
        "samples_per_shard": index.samples_per_shard,
        "shards": len(index.shards),
        "size_bytes": sum(shard.size_bytes for shard in index.shards),
        "columns": [
            {
                "name": column.name,
                "type": NUMPY_TYPES.get(column.dtype, column.dtype),
                "shape": list(column.shape),
                "varying": column.varying,
            }
            for column in index.columns
        ],
        "about": index.about,
    }
