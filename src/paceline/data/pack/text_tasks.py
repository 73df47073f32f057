"""Split text files into tasks: parts small enough for memory, several small files per task."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.data.pack.request import PackRequest, stat_of
from paceline.errors import DataError

SUFFIXES = (".txt", ".text", ".md")
_PART_BYTES = 1 << 22  # tokenizing a part takes about 40 times as much memory


class TextPart(NamedTuple):
    """A byte range of a file."""

    document: int
    path: str
    begin: int
    end: int

    def text(self) -> str:
        """Read and decode the range."""
        with Path(self.path).open("rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not UTF-8 text: byte {self.begin + error.start:,} is 0x{content[error.start]:02x}",
                fix="convert it to UTF-8, remove it, or use bytes: --as bytes to pack, level=bytes to train",
            ) from error


def find_texts(request: PackRequest) -> list[Path]:
    """Return the input files and those of input folders: all files with a text option, else text files."""
    every = bool({"text", "tokenizer", "train_tokenizer"}.intersection(request.asked))
    files: list[Path] = []
    for path in map(Path, request.inputs):
        files += sorted(_texts(path, every=every))
    return files


def _texts(path: Path, *, every: bool) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for root, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and (every or name.lower().endswith(SUFFIXES)):
                yield Path(root, name)


def has_texts(folder: Path) -> bool:
    """Return whether a folder contains a text file."""
    return any(path is not None for path in _texts(folder, every=False))


def tasks_of(files: Sequence[Path]) -> list[list[TextPart]]:
    """Return all parts in order, grouped into tasks of similar size.

    This depends on the files alone.
    """
    tasks: list[list[TextPart]] = [[]]
    size = 0
    for document, path in enumerate(files):
        cuts = [0, *_cuts(path), stat_of(path)[0]]
        for begin, end in itertools.pairwise(cuts):
            if size and size + end - begin > _PART_BYTES:
                tasks.append([])
                size = 0
            tasks[-1].append(TextPart(document, str(path.absolute()), begin, end))
            size += end - begin
    return tasks


def _cuts(path: Path) -> Iterator[int]:
    """Yield the cuts in a long file: at lines that do not begin with a space, where tokenizers split anyway."""
    size = stat_of(path)[0]
    if size <= _PART_BYTES:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = 0
        while size - at > _PART_BYTES:
            end = content.find(b"\n", at + _PART_BYTES)
            while end >= 0 and content[end + 1 : end + 2].isspace():
                end = content.find(b"\n", end + 1)
            if not 0 <= end < size - 1:
                return
            at = end + 1
            yield at
