"""Encode text as character indices or as tokens of a tokenizer, in worker processes."""

from __future__ import annotations

import itertools
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
from paceline.safe_open import read_json


@dataclass(frozen=True)
class CharacterTask:
    """Collects the characters of a text."""

    tasks: Sequence[Sequence[TextPart]]

    def run(self, number: int) -> str:
        """Return the distinct characters of one task, sorted."""
        return merge_characters(part.text() for part in self.tasks[number])

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        return {"job": "letters", "tasks": self.tasks}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> CharacterTask:
        """Rebuild the object from the dict of `tree`."""
        return cls(_parts(tree["tasks"]))


@dataclass(frozen=True)
class TokenTask:
    """Encodes text into one file of tokens per task."""

    tasks: Sequence[Sequence[TextPart]]
    folder: str
    dtype: str
    letters: str = ""
    """The vocabulary of characters."""
    tokenizer: str = ""
    """The tokenizer file, in place of `letters`."""
    end: int = -1
    """Token between documents; negative: none."""

    def run(self, number: int) -> list[int]:
        """Write the tokens of one task; return the count of each part."""
        encoded = [numpy.empty(0, self.dtype)]
        for part in self.tasks[number]:
            tokens = encode_part(part, self._vocabulary, self.end)
            encoded.append(tokens.astype(self.dtype))
        counts = [len(tokens) for tokens in encoded[1:]]
        write_whole(self.part(number), numpy.concatenate(encoded).tobytes())
        write_whole(self._note(number), json.dumps(counts).encode())
        return counts

    def done(self) -> dict[int, list[int]]:
        """Return the counts of tasks that an interrupted pack has finished."""
        finished = [number for number in range(len(self.tasks)) if self._note(number).exists()]
        return {number: read_json(self._note(number)) for number in finished}

    def part(self, number: int) -> Path:
        """Return the file for the tokens of a task."""
        return Path(self.folder, f"{number:06d}.bin")

    def _note(self, number: int) -> Path:
        """Return the file for the counts of a task, which exists once its tokens do."""
        return Path(self.folder, f"{number:06d}.json")

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return load_tokenizer(Path(self.tokenizer)) if self.tokenizer else Characters(self.letters)

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        return {"job": "tokens"} | asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> TokenTask:
        """Rebuild the object from the dict of `tree`."""
        return cls(**tree | {"tasks": _parts(tree["tasks"])})


def _parts(tasks: Sequence[Sequence[Sequence[Any]]]) -> list[list[TextPart]]:
    return [list(itertools.starmap(TextPart, task)) for task in tasks]


def encode_part(part: TextPart, vocabulary: Vocabulary, end: int) -> Array:
    """Return the tokens of a part, after the token `end` where a new document begins.

    A negative `end` is none.
    """
    tokens = vocabulary.encode(part.text())
    if end < 0 or not part.document or part.begin:
        return tokens
    return numpy.concatenate([numpy.array([end]), tokens])


def characters_in(tasks: Sequence[Sequence[TextPart]]) -> str:
    """Return the distinct characters of all parts, sorted."""
    return merge_characters(CharacterTask(tasks).run(number) for number in range(len(tasks)))


def merge_characters(texts: Iterable[str]) -> str:
    """Return the distinct characters of several texts, sorted.

    >>> merge_characters(["ad", "ab"])
    'abd'
    """
    return "".join(sorted(set().union(*texts)))
