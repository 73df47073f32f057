"""How texts become numbers: the places of their characters in a vocabulary, or the tokens of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from paceline.data.pack.text_tasks import TextPart
from paceline.data.shards.shard import Array
from paceline.data.vocabulary import Characters, Vocabulary, load_tokenizer
from paceline.rundir import write_whole


@dataclass(frozen=True)
class CharacterTask:
    """Which characters there are."""

    tasks: Sequence[Sequence[TextPart]]

    def run(self, number: int) -> str:
        """Return the characters of a task's pieces, each once."""
        return "".join(
            sorted({letter for piece in self.tasks[number] for letter in set(piece.text())})
        )

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""
        return {"job": "letters", "tasks": self.tasks}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> CharacterTask:
        """Return what `tree` said."""
        return cls(_pieces(tree["tasks"]))


@dataclass(frozen=True)
class TokenTask:
    """Texts as numbers, in a file for every task."""

    tasks: Sequence[Sequence[TextPart]]
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
        found = [
            encode_part(piece, self._vocabulary, self.end).astype(self.dtype)
            for piece in self.tasks[number]
        ]
        counts = [len(numbers) for numbers in found]
        write_whole(
            self.part(number), numpy.concatenate([numpy.empty(0, self.dtype), *found]).tobytes()
        )
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

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return load_tokenizer(Path(self.tokenizer)) if self.tokenizer else Characters(self.letters)

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""
        return {"job": "tokens"} | asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> TokenTask:
        """Return what `tree` said."""
        return cls(**tree | {"tasks": _pieces(tree["tasks"])})


def _pieces(tasks: Sequence[Sequence[Sequence[Any]]]) -> list[list[TextPart]]:
    return [[TextPart(*piece) for piece in task] for task in tasks]


def encode_part(piece: TextPart, vocabulary: Vocabulary, end: int) -> Array:
    """Return a piece of text as numbers; where it begins a document that is not the first, after `end`, if not negative."""
    numbers = vocabulary.encode(piece.text())
    if end < 0 or not piece.document or piece.begin:
        return numbers
    return numpy.concatenate([numpy.array([end]), numbers])


def characters_in(tasks: Sequence[Sequence[TextPart]]) -> str:
    """Return the characters of all pieces, each once, in order."""
    return merge_characters(CharacterTask(tasks).run(number) for number in range(len(tasks)))


def merge_characters(found: Iterable[str]) -> str:
    """Return what was found in several tasks, each character once, in order.

    >>> merge_characters(["ad", "ab"])
    'abd'
    """
    return "".join(sorted(set().union(*found)))
