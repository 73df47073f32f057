"""Show samples of a dataset: numbers abbreviated, text decoded, images drawn with characters."""

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
from paceline.data.shards.index import OFFSETS, Column, DatasetIndex
from paceline.data.shards.shard import Array, damaged, read_head
from paceline.data.shards.store import read_dataset_file
from paceline.data.vocabulary import vocabulary_of
from paceline.dtypes import NUMPY_NAMES
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.safe_open import open_plain

Colours = Literal["24-bit", "grey", "none"]

_SHADES = " .:-=+*#%@"
_SHOWN = 6  # numbers from each end of an array
_LEAST_SIDE = 4  # pixels; smaller arrays are not drawn as images
_TEXT_BYTES = 2_000


class Preview(NamedTuple):
    """One value of a sample as text, and as an image [height, width, 3] of bytes if it is one."""

    column: str
    words: str
    picture: Array | None = None


def read_sample(folder: Path, index: DatasetIndex, number: int) -> dict[str, Array]:
    """Return every column of a sample, after the checksum of its whole shard was verified."""
    if not 0 <= number < index.samples:
        raise ConfigError(
            f"sample must be 0 to {index.samples - 1}, got {number}",
            fix=f"pass a number from 0 to {index.samples - 1}",
        )
    shard, row = divmod(number, index.samples_per_shard)
    facts = index.shards[shard]
    path = folder / facts.name
    content = _map_shard(path)
    if len(content) != facts.size_bytes or xxhash.xxh3_64_hexdigest(content) != facts.xxh3:
        raise damaged(str(path), "its checksum does not match the index")
    layout = read_head(content[: facts.head_bytes], facts, index.columns, str(path))
    values = {}
    for column in index.columns:
        first, last = row, row + 1
        if column.varying:
            first, last = _span(content, layout.begins[column.name + OFFSETS], row)
        if not 0 <= first <= last <= layout.lengths[column.name]:
            why = f"sample {row} of {column.name} has offsets {first} to {last}"
            raise damaged(str(path), why)
        begin, size = layout.begins[column.name], column.item_bytes
        values[column.name] = _numbers(column, content[begin + first * size : begin + last * size])
    return values


def _map_shard(path: Path) -> memoryview:
    """Map a shard, which may be larger than memory."""
    try:
        os.close(open_plain(path, links=True))
        return numpy.memmap(path, mode="r").data
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise DataError(
            f"cannot read {path}: {why}", fix="download or pack the dataset again"
        ) from error


def _span(content: memoryview, offsets: int, row: int) -> tuple[int, int]:
    begin = offsets + 8 * row
    first, last = numpy.frombuffer(content[begin : begin + 16], dtype="<i8").tolist()
    return first, last


def _numbers(column: Column, content: memoryview) -> Array:
    """Return the elements of one value: bfloat16 as float32, float8 as bytes."""
    shape = (-1,) if column.varying else column.shape
    if column.dtype == "BF16":
        bits = numpy.frombuffer(content, dtype="<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(shape)
    name = NUMPY_NAMES.get(column.dtype, "uint8")
    return numpy.frombuffer(content, dtype=numpy.dtype(name).newbyteorder("<")).reshape(shape)


def preview_of(folder: Path, index: DatasetIndex, column: Column, value: Array) -> Preview:
    """Return a value as an image, as text, or as numbers, whatever it holds."""
    if column.varying or column.name == "tokens":
        picture = _decoded(value) if value.dtype == numpy.uint8 and column.varying else None
        if picture is not None:
            return Preview(column.name, f"an image of {len(value):,} bytes", picture)
        text = _text(folder, index, column, value)
        if text is not None:
            return Preview(column.name, text)
    picture = _as_picture(value)
    return Preview(column.name, summarize(value), picture)


def summarize(value: Array) -> str:
    """Return the first and last numbers of an array, with its shape and range.

    >>> summarize(numpy.array(7)), summarize(numpy.arange(3.0)), summarize(numpy.arange(784).reshape(28, 28))
    ('7', '0 1 2', '0 1 2 3 4 5 … 778 779 780 781 782 783  ([28, 28], 0 to 783)')
    """
    flat = value.reshape(-1)
    if len(flat) <= 2 * _SHOWN:
        return _listed(flat) or "empty"
    ends = f"{_listed(flat[:_SHOWN])} … {_listed(flat[-_SHOWN:])}"
    extent = "" if flat.dtype.kind == "c" else f", {_number(flat.min())} to {_number(flat.max())}"
    return f"{ends}  ({list(value.shape)}{extent})"


def _listed(values: Array) -> str:
    return " ".join(_number(value) for value in values)


def _number(value: Any) -> str:
    return f"{value:.4g}" if value.dtype.kind in "fc" else str(value)


def _text(folder: Path, index: DatasetIndex, column: Column, value: Array) -> str | None:
    """Return the text that tokens or bytes encode; None if they are not text."""
    about = index.about if column.name == "tokens" else {}
    vocabulary = vocabulary_of(about, lambda name: read_dataset_file(folder, name), str(folder))
    if vocabulary is None or vocabulary.level == "bytes":
        return _bytes_as_text(value, "strict" if vocabulary is None else "replace")
    if value.max(initial=0) >= vocabulary.size:
        return None
    try:
        return vocabulary.decode(value.tolist())
    except DataError:
        raise
    except PacelineError:
        return None  # for example: the tokenizers package is not installed


def _bytes_as_text(value: Array, errors: str) -> str | None:
    if value.dtype != numpy.uint8:
        return None
    try:
        return value.tobytes()[:_TEXT_BYTES].decode(errors=errors)
    except UnicodeDecodeError:
        return None


def _decoded(value: Array) -> Array | None:
    """Decode an image file; None if it is not one, or Pillow is not installed."""
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
    """Return an array in the shape of an image as RGB; None for any other shape."""
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
    """Return an image as lines of text, two rows of pixels per line, at most `width` wide."""
    small = _shrunk(picture.astype(float), width)
    if len(small) % 2:
        small = numpy.concatenate([small, numpy.zeros_like(small[:1])])
    pairs = zip(small[::2], small[1::2], strict=True)
    lines = []
    for upper, lower in pairs:
        pixels = zip(upper, lower, strict=True)
        if colours == "none":
            line = "".join(_shade((up + low) / 2) for up, low in pixels)
            lines.append(line.rstrip())
        else:
            line = "".join(_half(up, low, colours) for up, low in pixels)
            lines.append(line + "\x1b[0m")
    return lines


def _shrunk(picture: Any, most: int) -> Any:
    """Shrink an image to at most `most` rows and columns; each pixel is the mean of a square."""
    side = -(-max(picture.shape[:2]) // max(1, most))
    down, across = (min(side, length) for length in picture.shape[:2])
    height, width = picture.shape[0] // down, picture.shape[1] // across
    cut = picture[: height * down, : width * across]
    return cut.reshape(height, down, width, across, 3).mean(axis=(1, 3))


def _shade(pixel: Any) -> str:
    return _SHADES[min(len(_SHADES) - 1, int(pixel.mean() / 256 * len(_SHADES)))]


def _half(up: Any, low: Any, colours: Colours) -> str:
    """Return a character whose upper and lower half have the colours of two pixels."""
    if colours == "24-bit":
        upper, lower = (";".join(str(int(value)) for value in pixel) for pixel in (up, low))
        return f"\x1b[38;2;{upper};48;2;{lower}m▀"
    grey, lower_grey = (232 + int(pixel.mean() * 24 / 256) for pixel in (up, low))
    return f"\x1b[38;5;{grey};48;5;{lower_grey}m▀"


def facts_of(index: DatasetIndex) -> Mapping[str, Any]:
    """Return the facts of an index for people and JSON: no checksums."""
    columns = []
    for column in index.columns:
        facts = {
            "name": column.name,
            "type": NUMPY_NAMES.get(column.dtype, column.dtype),
            "shape": list(column.shape),
            "varying": column.varying,
        }
        columns.append(facts)
    return {
        "samples": index.samples,
        "samples_per_shard": index.samples_per_shard,
        "shards": len(index.shards),
        "size_bytes": sum(shard.size_bytes for shard in index.shards),
        "columns": columns,
        "about": index.about,
    }
