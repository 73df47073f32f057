"""`paceline data pack`: pack files into a dataset of shards."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.data import Progress, summary_of
from paceline.config.arguments import REQUIRED, option, positional
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.data.pack import PackRequest

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}


@dataclass(frozen=True, kw_only=True)
class PackArguments:
    """After an interruption, run the same command again: it resumes."""

    input: tuple[str, ...] = positional(metavar="INPUT")
    """Files or a folder: arrays (x.npy, x.npz, image=a.npy label=b.npy), MNIST's IDX files, HDF5, CLASS/x.png, texts, CSV, Parquet."""
    to: Path = option(REQUIRED, metavar="FOLDER")
    """Folder of the new dataset."""
    shard: str = option("32MB", metavar="SIZE")
    """Approximate size of a shard."""
    workers: int = 0
    """Worker processes (default: one per core). They do not change the result."""
    columns: str = option("", metavar="A,B")
    """Columns to pack, in this order (default: all, a label last)."""
    part: str = option("", metavar="train|test")
    """Part of MNIST (default: train)."""
    size: str = option("", metavar="HxW")
    """Decode images and resize them to this height and width; without it, image files are packed as they are."""
    grey: bool = False
    """Decode images to one channel instead of three."""
    text: str = option("", "--as", metavar="bytes|characters|tokens")
    """Treat the input as text, and pack it as these elements (default: bytes)."""
    tokenizer: str = option("", metavar="FILE")
    """Tokenize text with this tokenizer.json."""
    train_tokenizer: int = option(0, metavar="VOCABULARY")
    """Train a byte-level BPE tokenizer of this vocabulary size on the input (default: no)."""
    length: int = option(0, metavar="T")
    """Join the texts and cut them into rows of T+1 elements that overlap by one (default: one row per file)."""
    flatten: bool = False
    """Rows of an HDF5 file hold a group of samples each: make (600, 100, 28, 28) 60,000 samples. A label per group is repeated."""
    force: bool = False
    """Overwrite a dataset, or the partial result of another pack."""
    json: bool = False
    """Print the result as JSON."""


def pack_dataset(arguments: PackArguments) -> int:
    """Pack the input; return the exit code."""
    from paceline.data.pack import pack
    from paceline.data.shards.show import facts_of

    if arguments.workers < 0:
        raise ConfigError(
            f"--workers must be at least 0, got {arguments.workers}",
            fix="remove it to use one worker per core",
        )
    request = _request(arguments)
    folder, bar = arguments.to, Progress(quiet=arguments.json)
    begun = time.monotonic()
    try:
        index = pack(
            request, folder, workers=arguments.workers, force=arguments.force, progress=bar
        )
    except KeyboardInterrupt:
        bar.clear()
        print(f"interrupted; run the same command to resume in {folder}", file=sys.stderr)
        return 130
    finally:
        bar.clear()
    seconds = time.monotonic() - begun
    if arguments.json:
        facts = {"where": str(folder)} | dict(facts_of(index)) | {"seconds": round(seconds, 3)}
        print(json.dumps(facts, indent=2))
    else:
        print(f"{folder}: {summary_of(facts_of(index))}, in {seconds:.1f} s")
    return 0


def _request(arguments: PackArguments) -> PackRequest:
    from paceline.data.pack import PackRequest

    return PackRequest(
        arguments.input,
        size_from(arguments.shard),
        part=arguments.part,
        columns=_names(arguments.columns),
        size=_height_and_width(arguments.size),
        grey=arguments.grey,
        text=arguments.text,
        tokenizer=arguments.tokenizer,
        train_tokenizer=arguments.train_tokenizer,
        length=arguments.length,
        flatten=arguments.flatten,
    )


def size_from(text: str) -> int:
    """Return a number of bytes.

    >>> size_from("32MB"), size_from("1.5 GiB"), size_from("4096")
    (32000000, 1610612736, 4096)
    """
    digits = text.rstrip(" abcgikmABCGIKM")
    unit = text[len(digits) :].strip().lower()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"--shard {text!r} is not a size", fix="for example: --shard 32MB")
    return size


def _height_and_width(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise ConfigError(
            f"--size {text!r} is not a height and a width", fix="give both, as in --size 28x28"
        )
    return int(sides[0]), int(sides[1])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
