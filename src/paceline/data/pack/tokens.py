"""How texts become numbers: the places of their characters in a vocabulary, or the tokens of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from paceline.data.pack.extras import need
from paceline.data.pack.pieces import Piece
from paceline.data.shard import Array
from paceline.errors import DataError
from paceline.rundir import write_whole

_END_OF_TEXT = "<|endoftext|>"
_ENDS = (_END_OF_TEXT, "<|end_of_text|>", "<|eos|>", "<eos>", "</s>")


@dataclass(frozen=True)
class LetterJob:
    """Which characters there are."""

    tasks: Sequence[Sequence[Piece]]

    def run(self, number: int) -> str:
        """Return the characters of a task's pieces, each once."""
        return "".join(sorted({letter for piece in self.tasks[number] for letter in set(piece.text())}))

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""
        return {"job": "letters", "tasks": self.tasks}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> LetterJob:
        """Return what `tree` said."""
        return cls(_pieces(tree["tasks"]))


@dataclass(frozen=True)
class TokenJob:
    """Texts as numbers, in a file for every task."""

    tasks: Sequence[Sequence[Piece]]
    folder: str
    dtype: str
    letters: str = ""
    """The vocabulary, if numbers stand for characters."""
    tokenizer: str = ""
    """The tokenizer's file, if they do not."""
    end: int = -1
    """What is put between documents, if not negative."""

    def run(self, number: int) -> list[int]:
        """Write the numbers of a task; return how many every piece has."""
        found: list[Array] = []
        for piece in self.tasks[number]:
            numbers = numpy.asarray(self._encode(piece.text()), dtype=self.dtype)
            if self.end >= 0 and piece.document and not piece.begin:
                numbers = numpy.concatenate([numpy.array([self.end], self.dtype), numbers])
            found.append(numbers)
        counts = [len(numbers) for numbers in found]
        write_whole(self.part(number), numpy.concatenate([numpy.empty(0, self.dtype), *found]).tobytes())
        write_whole(self._note(number), json.dumps(counts).encode())
        return counts

    def done(self) -> dict[int, list[int]]:
        """Return what came of the tasks that were done before."""
        there = [number for number in range(len(self.tasks)) if self._note(number).exists()]
        return {number: json.loads(self._note(number).read_bytes()) for number in there}

    def part(self, number: int) -> Path:
        """Return the file of a task's numbers."""
        return Path(self.folder, f"{number:06d}.bin")

    def _note(self, number: int) -> Path:
        """Return the file that says how many those are; it exists once they do."""
        return Path(self.folder, f"{number:06d}.json")

    def _encode(self, text: str) -> Any:
        if self.tokenizer:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return numpy.searchsorted(_codes(self.letters), _codes(text))

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(Path(self.tokenizer))

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""
        return {"job": "tokens"} | asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> TokenJob:
        """Return what `tree` said."""
        return cls(**tree | {"tasks": _pieces(tree["tasks"])})


def _pieces(tasks: Sequence[Sequence[Sequence[Any]]]) -> list[list[Piece]]:
    return [[Piece(*piece) for piece in task] for task in tasks]


def _codes(text: str) -> Array:
    return numpy.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def width_for(vocabulary: int) -> str:
    """Return the narrowest type that holds so many different numbers.

    >>> [width_for(count) for count in (65, 256, 257, 50257, 200_000)]
    ['<u1', '<u1', '<u2', '<u2', '<u4']
    """
    return "<u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4"


def load_tokenizer(path: Path) -> Any:
    """Read a tokenizer that takes texts as they are: it neither cuts nor fills them."""
    tokenizers = need("tokenizers", "packing tokens")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"cannot read {path} as a tokenizer: {error}",
            fix="give a file that the tokenizers library has saved (tokenizer.json), or --train-tokenizer VOCAB",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> str:
    """Return the file of a byte-level BPE tokenizer, trained on texts; the same for the same texts."""
    tokenizers = need("tokenizers", "packing tokens")
    inner = need("tokenizers.pre_tokenizers", "packing tokens").ByteLevel
    tokenizer = tokenizers.Tokenizer(need("tokenizers.models", "packing tokens").BPE())
    tokenizer.pre_tokenizer = inner(add_prefix_space=False)
    tokenizer.decoder = need("tokenizers.decoders", "packing tokens").ByteLevel()
    trainer = need("tokenizers.trainers", "packing tokens").BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=sorted(inner.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=True))


def end_of_text(tokenizer: Any) -> int:
    """Return the token that ends a text, or -1 if there is none."""
    known = (tokenizer.token_to_id(word) for word in _ENDS)
    return next((number for number in known if number is not None), -1)
