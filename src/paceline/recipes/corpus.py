"""Text as token sequences: from a file or folder, or from the Python standard library, which every machine has."""

from __future__ import annotations

import itertools
import sysconfig
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

_HELD_OUT = 20  # disjoint windows: hold out every 20th sequence,
_MOST_HELD_OUT = 256  # but not more than these
_TRAINED_ON = 0.9  # overlapping windows: share of the text to train on; the rest is held out
_NAME_TEXT = "name a file or folder of text in data_folder="


def read_text(path: str) -> bytes:
    """Return the bytes of a file, or of all files of a folder in order.

    An empty path means the Python standard library.
    """
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
    if not any(part.end > part.begin for part in itertools.chain(*tasks)):
        raise DataError(f"there is no text in {_root(path)}", fix=_NAME_TEXT)
    return tasks


def make_vocabulary(path: str, level: Level, tokenizer: str, vocabulary: int) -> Vocabulary:
    """Return bytes, the characters of the text, or a tokenizer that is read or trained on the text."""
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
    texts = (part.text() for part in itertools.chain(*_tasks(path)))
    return Tokens.of(train_tokenizer(texts, vocabulary).encode())


def split_rows(text: bytes | Array, length: int) -> Tensor:
    """Return consecutive sequences of length + 1 tokens, which overlap by one token.

    >>> split_rows(b"abcdefgh", 3).tolist() == [list(b"abcd"), list(b"defg")]
    True
    """
    count = (len(text) - 1) // length
    if count < 1:
        raise _too_short(len(text), length)
    return _as_tensor(text).unfold(0, length + 1, length)[:count].contiguous()


def _as_tensor(text: bytes | Array) -> Tensor:
    if isinstance(text, bytes):
        text = numpy.frombuffer(text, dtype=numpy.uint8).copy()
    return torch.from_numpy(text)


def _too_short(elements: int, length: int) -> DataError:
    return DataError(
        f"the text has {elements} tokens, fewer than one sequence of {length}",
        fix="add more text, or set a lower context_length=",
    )


def encode_text(path: str, vocabulary: Vocabulary) -> bytes | Array:
    """Return the tokens of all files, with the end-of-text token of a tokenizer between files."""
    if isinstance(vocabulary, Bytes):
        return read_text(path)
    # torch cannot index tensors of other unsigned types.
    dtype = numpy.uint8 if vocabulary.size <= 256 else numpy.int32
    parts = itertools.chain(*_tasks(path))
    encoded = (encode_part(part, vocabulary, vocabulary.end) for part in parts)
    return numpy.concatenate([numbers.astype(dtype) for numbers in encoded])


def text_in_memory(
    path: str, length: int, vocabulary: Vocabulary | None = None, windows: str = "disjoint"
) -> tuple[Any, Any]:
    """Return training and held-out sequences; without a vocabulary, of bytes."""
    text = encode_text(path, vocabulary or Bytes())
    split = _overlapping if windows == "overlapping" else _disjoint
    train, test = (TensorSource(rows) for rows in split(text, length))
    return Transformed(train, next_tokens), Transformed(test, next_tokens)


def _disjoint(text: bytes | Array, length: int) -> tuple[Tensor, Tensor]:
    rows = split_rows(text, length)
    if len(rows) == 1:
        raise DataError(
            "the text has one sequence, which leaves none to hold out",
            fix="add more text, or set a lower context_length=",
        )
    every = min(len(rows), max(_HELD_OUT, len(rows) // _MOST_HELD_OUT))
    held_out = torch.arange(len(rows)) % every == every - 1
    return rows[~held_out], rows[held_out]


def _overlapping(text: bytes | Array, length: int) -> tuple[Tensor, Tensor]:
    """Return a sequence per token of the first 90 %, as views of one tensor, and disjoint ones of the last 10 %."""
    middle = int(len(text) * _TRAINED_ON)
    if middle <= length:
        raise _too_short(middle, length)
    return _as_tensor(text[:middle]).unfold(0, length + 1, 1), split_rows(text[middle:], length)


def text_from_shards(address: str, config: RunConfig) -> tuple[Any, Any]:
    """Return the datasets `train` and `test` of a folder or address, whose sequences have one token more than the context."""
    if not address:
        raise DataError(
            "data=shards needs the folder or address of the datasets `train` and `test`",
            fix="run `paceline data pack TEXT --as bytes --length 128 --to SETS/train`, the same for test, and set data_folder=SETS",
        )
    train, test = (
        open_dataset(f"{address.rstrip('/')}/{part}", config, transform=next_tokens)
        for part in ("train", "test")
    )
    return train, test


def vocabulary_of_datasets(train: Any, test: Any) -> Vocabulary | None:
    """Return the common vocabulary of both datasets; None if they do not store it."""
    first, second = _stored_vocabulary(train.source), _stored_vocabulary(test.source)
    if first is not None and second is not None and first != second:
        raise DataError(
            "the datasets `train` and `test` have different vocabularies",
            fix="pack both with --as bytes, or with the same --tokenizer FILE",
        )
    return first


def _stored_vocabulary(source: Any) -> Vocabulary | None:
    if not hasattr(source, "vocabulary"):
        return None  # an HDF5 file
    vocabulary: Vocabulary | None = source.vocabulary()
    if vocabulary is None and source.columns[0].dtype == "U8":
        return Bytes()
    return vocabulary


def next_tokens(batch: Batch, draws: SampleRng) -> Batch:
    """Return the inputs, and the targets: the same sequence one token later."""
    tokens = batch[0].long()
    return tokens[:, :-1], tokens[:, 1:]
