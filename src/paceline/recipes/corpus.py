"""Text as rows of bytes: of the Python standard library, which is on every machine, or of any file or folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.draws import Draws
from paceline.data.open import open_set
from paceline.data.source import Batch, TensorSource
from paceline.data.transform import Transformed
from paceline.errors import DataError

_HELD_OUT = 20  # every twentieth row,
_MOST_HELD_OUT = 256  # or every so many that these are left


def read_text(path: str) -> bytes:
    """Return the text of a file, or of the files of a folder one after the other; empty: Python's own modules."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py" if not path else "**/*")) if root.is_dir() else [root]
    try:
        content = b"".join(file.read_bytes() for file in files if file.is_file())
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}", fix="name a file or folder of text in data_folder="
        ) from error
    if not content:
        raise DataError(f"there is no text in {root}", fix="name a file or folder of text in data_folder=")
    return content


def rows_of(text: bytes, length: int) -> Tensor:
    """Cut text into rows of length + 1; a row begins with the last byte of the one before, which it has to predict from.

    >>> rows_of(b"abcdefgh", 3).tolist() == [list(b"abcd"), list(b"defg")]
    True
    """
    count = (len(text) - 1) // length
    if count < 1:
        raise DataError(
            f"{len(text)} bytes of text are less than one row of {length}", fix="give more text, or set length= lower"
        )
    flat = numpy.frombuffer(text, dtype=numpy.uint8)
    places = numpy.arange(count)[:, None] * length + numpy.arange(length + 1)
    return torch.from_numpy(flat[places])


def text_in_memory(path: str, length: int) -> tuple[Any, Any]:
    """Return rows to train on, and rows held out."""
    rows = rows_of(read_text(path), length)
    every = max(_HELD_OUT, len(rows) // _MOST_HELD_OUT)
    held_out = torch.arange(len(rows)) % every == every - 1
    return Transformed(TensorSource(rows[~held_out]), next_tokens), Transformed(
        TensorSource(rows[held_out]), next_tokens
    )


def text_from_shards(address: str, config: RunConfig) -> tuple[Any, Any]:
    """Return the same from two sets, `train` and `test`, of rows with one token more than the length."""
    if not address:
        raise DataError(
            "data=shards needs the folder or address that holds the sets `train` and `test`",
            fix="make them with `paceline data pack TEXT --as bytes --length 128 --to SETS/train`, and set data_folder=SETS",
        )
    train, test = (
        open_set(f"{address.rstrip('/')}/{part}", config, transform=next_tokens) for part in ("train", "test")
    )
    return train, test


def next_tokens(batch: Batch, draws: Draws) -> Batch:
    """Return what is read, and what is to be said next."""
    tokens = batch[0].long()
    return tokens[:, :-1], tokens[:, 1:]
