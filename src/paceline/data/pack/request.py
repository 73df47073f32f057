"""A request to pack an input: all options that decide the bytes of the dataset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from paceline.data.vocabulary import SMALLEST_VOCABULARY
from paceline.errors import ConfigError, DataError, did_you_mean
from paceline.version import VERSION

SHARD_BYTES = 32_000_000
"""Default size of a shard, approximately."""

FLAGS = {
    "part": "--part", "columns": "--columns", "size": "--size", "grey": "--grey", "text": "--as",
    "tokenizer": "--tokenizer", "train_tokenizer": "--train-tokenizer", "length": "--length", "flatten": "--flatten",
}  # fmt: skip
"""Options that apply only to some kinds of input, by field name."""


@dataclass(frozen=True)
class PackRequest:
    """An input and the options for packing it.

    An option with its default value counts as not given.
    """

    inputs: tuple[str, ...]
    """Files or folders; NAME=FILE names the column of an array."""
    shard_bytes: int = SHARD_BYTES
    part: str = ""
    """Split of MNIST: train (the default) or test."""
    columns: tuple[str, ...] = ()
    """Columns in this order; empty: all, labels last."""
    size: tuple[int, int] = (0, 0)
    """Height and width to resize images to; 0: pack the encoded files."""
    grey: bool = False
    text: str = ""
    """What a token of a text is: bytes, characters or tokens."""
    tokenizer: str = ""
    """A tokenizer.json of the tokenizers library."""
    train_tokenizer: int = 0
    """Train a tokenizer of this vocabulary size."""
    length: int = 0
    """Sequence length: rows of length + 1 tokens that overlap by one; 0: one row per file."""
    flatten: bool = False
    """Rows of an HDF5 file are groups of samples: the second axis counts the samples of a group."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("no input to pack", fix="name a file or a folder")
        for value, known, flag in (
            (self.part, ("train", "test"), "part"),
            (self.text, TEXTS, "text"),
        ):
            if value and value not in known:
                raise ConfigError(
                    f"{FLAGS[flag]} {value} is not a choice", fix=did_you_mean(value, known)
                )
        if self.train_tokenizer and self.train_tokenizer < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"--train-tokenizer must be at least {SMALLEST_VOCABULARY} "
                f"(all bytes and the end of text), got {self.train_tokenizer}",
                fix=f"use --train-tokenizer {SMALLEST_VOCABULARY} or more",
            )
        for option, number, least in (
            ("--shard", self.shard_bytes, 1),
            ("--length", self.length, 0),
        ):
            if number < least:
                raise ConfigError(
                    f"{option} must be at least {least}, got {number}",
                    fix=f"use {option} 1 or more",
                )

    @property
    def asked(self) -> list[str]:
        """The fields in FLAGS that differ from their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in FLAGS if getattr(self, name) != defaults[name]]

    def digest(self, files: Sequence[Path]) -> str:
        """Return a hash of the options, and of the names, sizes and times of the input files."""
        options = asdict(self) | {"version": VERSION}
        digest = xxhash.xxh3_128(json.dumps(options, sort_keys=True).encode())
        tokenizer = [Path(self.tokenizer)] if self.tokenizer else []
        for path in [*files, *tokenizer]:
            size, changed_ns = stat_of(path)
            line = f"{path.absolute()}\n{size} {changed_ns}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()


TEXTS = ("bytes", "characters", "tokens")


def stat_of(path: Path) -> tuple[int, int]:
    """Return the size of an input file, and its modification time in ns."""
    try:
        facts = path.stat()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", fix="check the path and its permissions"
        ) from error
    return facts.st_size, facts.st_mtime_ns
