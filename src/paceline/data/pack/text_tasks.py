"""How the work on texts is cut: pieces of files, small enough for memory, several small ones to a task."""

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
_PIECE_BYTES = 1 << 22  # the tokens of one take some 40 times as much memory


class TextPart(NamedTuple):
    """A stretch of a file."""

    document: int
    path: str
    begin: int
    end: int

    def text(self) -> str:
        """Return the text."""
        with Path(self.path).open("rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not text in UTF-8: byte {self.begin + error.start:,} is 0x{content[error.start]:02x}",
                fix="convert that file to UTF-8, leave it out, or take bytes: pack it --as bytes, train with level=bytes",
            ) from error


def find_texts(request: PackRequest) -> list[Path]:
    """Return the files that are named, and those in folders: all, if it was said what to make of them."""
    said = bool({"text", "tokenizer", "train_tokenizer"}.intersection(request.asked))
    return [path for word in request.words for path in sorted(_texts(Path(word), every=said))]


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
    """Return whether some file of a folder is called a text."""
    return any(path is not None for path in _texts(folder, every=False))


def tasks_of(files: Sequence[Path]) -> list[list[TextPart]]:
    """Return all pieces in order, as tasks of about one piece's bytes; what they are depends on the files alone."""
    tasks: list[list[TextPart]] = [[]]
    held = 0
    for document, path in enumerate(files):
        cuts = [0, *_cuts(path), stat_of(path)[0]]
        for begin, end in itertools.pairwise(cuts):
            if held and held + end - begin > _PIECE_BYTES:
                tasks.append([])
                held = 0
            tasks[-1].append(TextPart(document, str(path.absolute()), begin, end))
            held += end - begin
    return tasks


def _cuts(path: Path) -> Iterator[int]:
    """Yield where a long file is cut: where a line begins, and not with a space, so that hardly a tokenizer can tell."""
    size = stat_of(path)[0]
    if size <= _PIECE_BYTES:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = 0
        while size - at > _PIECE_BYTES:
            end = content.find(b"\n", at + _PIECE_BYTES)
            while end >= 0 and content[end + 1 : end + 2].isspace():
                end = content.find(b"\n", end + 1)
            if not 0 <= end < size - 1:
                return
            at = end + 1
            yield at
