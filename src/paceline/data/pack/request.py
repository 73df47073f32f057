"""What is to be packed, and how: all that decides the bytes of a set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import xxhash

from paceline.data.vocabulary import SMALLEST_VOCABULARY
from paceline.errors import ConfigError, DataError, did_you_mean
from paceline.version import VERSION

SHARD_BYTES = 32_000_000
"""About how large a shard is, unless it is asked for otherwise."""

FLAGS = {
    "part": "--part", "columns": "--columns", "size": "--size", "grey": "--grey", "text": "--as",
    "tokenizer": "--tokenizer", "train_tokenizer": "--train-tokenizer", "length": "--length",
}  # fmt: skip
"""The options that only some kinds of input heed, by the name of their field."""


@dataclass(frozen=True)
class PackRequest:
    """An input and the options of packing it; what has its default was not asked for."""

    words: tuple[str, ...]
    """Files or folders; NAME=FILE for an array whose column is to be called so."""
    shard_bytes: int = SHARD_BYTES
    part: str = ""
    """Of MNIST: train or test; without a word, train."""
    columns: tuple[str, ...] = ()
    """Which columns, in this order; none: all, the label last."""
    size: tuple[int, int] = (0, 0)
    """Height and width that images are brought to; 0: their files are packed as they are."""
    grey: bool = False
    text: str = ""
    """What an element of a text is: bytes, characters or tokens."""
    tokenizer: str = ""
    """A file of the tokenizers library."""
    train_tokenizer: int = 0
    """Train one on the spot, with so many tokens."""
    length: int = 0
    """Rows of so many elements and one more, the next row's first; 0: a row per file."""

    def __post_init__(self) -> None:
        if not self.words:
            raise ConfigError("there is nothing to pack", fix="name a file or a folder")
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
                f"a tokenizer of {self.train_tokenizer} tokens cannot hold every byte and the end of a text",
                fix=f"give --train-tokenizer {SMALLEST_VOCABULARY} or more",
            )
        for flag, number in (("--shard", self.shard_bytes - 1), ("--length", self.length)):
            if number < 0:
                raise ConfigError(f"{flag} is too small", fix=f"give {flag} a number above 0")

    @property
    def asked(self) -> list[str]:
        """The fields, of those that only some inputs heed, that are not as they are by default."""
        defaults = {
            field.name: field.default for field in fields(self) if field.default is not MISSING
        }
        return [name for name in FLAGS if getattr(self, name) != defaults[name]]

    def digest(self, files: Sequence[Path]) -> str:
        """Return a sum of the options, and of the names, sizes and times of the input's files."""
        summed = xxhash.xxh3_128(
            json.dumps(asdict(self) | {"version": VERSION}, sort_keys=True).encode()
        )
        for path in [*files, *([Path(self.tokenizer)] if self.tokenizer else [])]:
            facts = stat_of(path)
            summed.update(
                f"{path.absolute()}\n{facts[0]} {facts[1]}\n".encode(errors="surrogateescape")
            )
        return summed.hexdigest()


TEXTS = ("bytes", "characters", "tokens")


def stat_of(path: Path) -> tuple[int, int]:
    """Return the size of an input file, and when it was changed."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", fix="check the path, and who may read it"
        ) from error
    return found.st_size, found.st_mtime_ns
