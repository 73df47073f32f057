"""Text as rows of numbers: of the Python standard library, which is on every machine, or of any file or folder."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.pack.text_tasks import TextPart, tasks_of
from paceline.data.pack.tokens import characters_in, encode_part
from paceline.data.reading.open_dataset import open_dataset
from paceline.data.reading.sample_rng import SampleRng
from paceline.data.reading.source import Batch, TensorSource
from paceline.data.reading.transform import Transformed
from paceline.data.shards.shard import Array
from paceline.data.vocabulary import (
    Bytes,
    Characters,
    Level,
    Tokens,
    Vocabulary,
    load_tokenizer,
    train_tokenizer,
)
from paceline.errors import ConfigError, DataError

_HELD_OUT = 20  # every twentieth row,
_MOST_HELD_OUT = 256  # or every so many that these are left
_TRAINED_ON = 0.9  # of a text whose rows begin anywhere; the rest is held out
_NAME_TEXT = "name a file or folder of text in data_folder="


def read_text(path: str) -> bytes:
    """Return the text of a file, or of the files of a folder one after the other; empty: Python's own modules."""
    try:
        content = b"".join(file.read_bytes() for file in _files(path))
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}", fix=_NAME_TEXT
        ) from error
    if not content:
        raise DataError(f"there is no text in {_root(path)}", fix=_NAME_TEXT)
    return content


def _root(path: str) -> Path:
    return Path(path or sysconfig.get_paths()["stdlib"])


def _files(path: str) -> list[Path]:
    root = _root(path)
    if not root.is_dir():
        return [root]
    return [file for file in sorted(root.glob("**/*" if path else "*.py")) if file.is_file()]


def _tasks(path: str) -> list[list[TextPart]]:
    tasks = tasks_of(_files(path))
    if not any(piece.end > piece.begin for task in tasks for piece in task):
        raise DataError(f"there is no text in {_root(path)}", fix=_NAME_TEXT)
    return tasks


def make_vocabulary(path: str, level: Level, tokenizer: str, vocabulary: int) -> Vocabulary:
    """Return what the numbers of a text are to stand for; a tokenizer is read, or trained on the text."""
    if level == "bytes":
        return Bytes()
    if level == "characters":
        return Characters(characters_in(_tasks(path)))
    if tokenizer:
        return load_tokenizer(Path(tokenizer))
    if not vocabulary:
        raise ConfigError(
            "level=tokens needs a tokenizer",
            fix="add tokenizer=FILE, or train_tokenizer=8192 to train one",
        )
    texts = (piece.text() for piece in itertools.chain(*_tasks(path)))
    return Tokens.of(train_tokenizer(texts, vocabulary).encode())


def split_rows(text: bytes | Array, length: int) -> Tensor:
    """Cut text into rows of length + 1; a row begins with the last element of the one before, which it has to predict from.

    >>> split_rows(b"abcdefgh", 3).tolist() == [list(b"abcd"), list(b"defg")]
    True
    """
    count = (len(text) - 1) // length
    if count < 1:
        raise _too_short(len(text), length)
    return _as_tensor(text).unfold(0, length + 1, length)[:count].contiguous()


def _as_tensor(text: bytes | Array) -> Tensor:
    return torch.from_numpy(
        numpy.frombuffer(text, dtype=numpy.uint8).copy() if isinstance(text, bytes) else text
    )


def _too_short(elements: int, length: int) -> DataError:
    return DataError(
        f"text of {elements} elements is less than one row of {length}",
        fix="give more text, or set context_length= lower",
    )


def encode_text(path: str, vocabulary: Vocabulary) -> bytes | Array:
    """Return a text as numbers: bytes one after the other; else with the mark of an end, if there is one, between files."""
    if isinstance(vocabulary, Bytes):
        return read_text(path)
    dtype = (
        numpy.uint8 if vocabulary.size <= 256 else numpy.int32
    )  # torch selects no rows of other unsigned numbers
    pieces: Sequence[TextPart] = list(itertools.chain(*_tasks(path)))
    return numpy.concatenate(
        [encode_part(piece, vocabulary, vocabulary.end).astype(dtype) for piece in pieces]
    )


def text_in_memory(
    path: str, length: int, vocabulary: Vocabulary | None = None, windows: str = "disjoint"
) -> tuple[Any, Any]:
    """Return rows to train on, and rows held out; without a vocabulary, of bytes."""
    text = encode_text(path, vocabulary or Bytes())
    train, test = _cut_anywhere(text, length) if windows == "overlapping" else _cut(text, length)
    return Transformed(TensorSource(train), next_tokens), Transformed(
        TensorSource(test), next_tokens
    )


def _cut(text: bytes | Array, length: int) -> tuple[Tensor, Tensor]:
    rows = split_rows(text, length)
    if len(rows) == 1:
        raise DataError(
            "one row of text leaves none to train on and none to hold out",
            fix="give more text, or set context_length= lower",
        )
    every = min(len(rows), max(_HELD_OUT, len(rows) // _MOST_HELD_OUT))
    held_out = torch.arange(len(rows)) % every == every - 1
    return rows[~held_out], rows[held_out]


def _cut_anywhere(text: bytes | Array, length: int) -> tuple[Tensor, Tensor]:
    """Return a row for every place of the first nine tenths, as views of one text; and rows of the last tenth."""
    middle = int(len(text) * _TRAINED_ON)
    if middle <= length:
        raise _too_short(middle, length)
    return _as_tensor(text[:middle]).unfold(0, length + 1, 1), split_rows(text[middle:], length)


def text_from_shards(address: str, config: RunConfig) -> tuple[Any, Any]:
    """Return the same from two sets, `train` and `test`, of rows with one token more than the length."""
    if not address:
        raise DataError(
            "data=shards needs the folder or address that holds the sets `train` and `test`",
            fix="make them with `paceline data pack TEXT --as bytes --length 128 --to SETS/train`, and set data_folder=SETS",
        )
    train, test = (
        open_dataset(f"{address.rstrip('/')}/{part}", config, transform=next_tokens)
        for part in ("train", "test")
    )
    return train, test


def vocabulary_of_datasets(train: Any, test: Any) -> Vocabulary | None:
    """Return what the numbers of both sets stand for: one thing; None if they do not say it. Plain bytes need not."""
    known = [_said(part.source) for part in (train, test)]
    if None not in known and known[0] != known[1]:
        raise DataError(
            "the sets `train` and `test` were made with different vocabularies",
            fix="pack both with --as bytes, or with the same --tokenizer FILE",
        )
    return known[0]


def _said(source: Any) -> Vocabulary | None:
    if not hasattr(source, "vocabulary"):
        return None  # an HDF5 file
    found: Vocabulary | None = source.vocabulary()
    return Bytes() if found is None and source.columns[0].dtype == "U8" else found


def next_tokens(batch: Batch, draws: SampleRng) -> Batch:
    """Return what is read, and what is to be said next."""
    tokens = batch[0].long()
    return tokens[:, :-1], tokens[:, 1:]
