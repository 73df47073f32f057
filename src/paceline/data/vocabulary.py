"""What the numbers of a text stand for: its bytes, its characters, or the tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy
import xxhash

from paceline.data.shards.shard import Array
from paceline.errors import ConfigError, DataError

TOKENIZER = "tokenizer.json"
"""The file of a tokenizer, beside what speaks of it."""
SMALLEST_VOCABULARY = 257
"""Every byte, and the end of a text: what a tokenizer that is trained must hold."""

_END_OF_TEXT = "<|endoftext|>"
_ENDS = (_END_OF_TEXT, "<|end_of_text|>", "<|eos|>", "<eos>", "</s>")

Level = Literal["bytes", "characters", "tokens"]


@dataclass(frozen=True)
class Bytes:
    """A number is a byte of UTF-8."""

    level: ClassVar[Level] = "bytes"
    size: ClassVar[int] = 256
    end: ClassVar[int] = -1
    files: ClassVar[Mapping[str, bytes]] = {}

    def encode(self, text: str) -> Array:
        """Return the numbers of a text."""
        return numpy.frombuffer(text.encode(), dtype="u1")

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of numbers; what is no UTF-8 shows as such."""
        return bytes(numbers).decode(errors="replace")

    def about(self) -> dict[str, Any]:
        """Return what an index says of it."""
        return {"text": self.level, "vocabulary": self.size}


@dataclass(frozen=True)
class Characters:
    """A number is the place of a character among those there are."""

    letters: str
    """All of them, in order."""
    level: ClassVar[Level] = "characters"
    end: ClassVar[int] = -1
    files: ClassVar[Mapping[str, bytes]] = {}

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.letters)

    def encode(self, text: str) -> Array:
        """Return the numbers of a text; a character that is not there is named."""
        known, wanted = _codes(self.letters), _codes(text)
        found = numpy.searchsorted(known, wanted)
        wrong = known.take(found, mode="clip") != wanted
        if wrong.any():
            letter = text[int(wrong.argmax())]
            raise ConfigError(
                f"the character {letter!r} is not among the {self.size} of the text",
                fix=f"leave it out, or use these: {self.letters[:200]!r}",
            )
        return found

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of numbers."""
        return "".join(self.letters[number] for number in numbers)

    def about(self) -> dict[str, Any]:
        """Return what an index says of it."""
        return {"text": self.level, "vocabulary": self.size, "characters": self.letters}


@dataclass(frozen=True)
class Tokens:
    """A number is a token of a tokenizer."""

    content: bytes
    """The tokenizer's file. It is read when a text is: the numbers alone need no package."""
    size: int
    end: int = -1
    """The token between two texts; -1: none."""
    where: str = field(default=TOKENIZER, compare=False)
    level: ClassVar[Level] = "tokens"

    @classmethod
    def of(cls, content: bytes, where: str = TOKENIZER) -> Tokens:
        """Return what the file of a tokenizer holds."""
        tokenizer = read_tokenizer(content, where)
        size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return cls(content, size, end_of_text(tokenizer), where)

    @property
    def files(self) -> Mapping[str, bytes]:
        """What must be kept beside the numbers."""
        return {TOKENIZER: self.content}

    def encode(self, text: str) -> Array:
        """Return the numbers of a text."""
        return numpy.asarray(
            self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=numpy.int64
        )

    def lost(self, text: str) -> str:
        """Return the first character that no token stands for; spaces may go unsaid."""
        found, unknown = self._tokenizer.encode(text, add_special_tokens=False), self._unknown
        spans = [
            span for number, span in zip(found.ids, found.offsets, strict=True) if number != unknown
        ]
        said = {place for begin, end in spans for place in range(begin, end)}
        return next(
            (
                letter
                for place, letter in enumerate(text)
                if place not in said and not letter.isspace()
            ),
            "",
        )

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of numbers."""
        return str(self._tokenizer.decode(list(numbers), skip_special_tokens=False))

    def about(self) -> dict[str, Any]:
        """Return what an index says of it."""
        facts = {
            "text": self.level,
            "vocabulary": self.size,
            "end_of_text": self.end if self.end >= 0 else None,
        }
        return facts | {"files": {TOKENIZER: xxhash.xxh3_64_hexdigest(self.content)}}

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self.content, self.where)

    @cached_property
    def _unknown(self) -> int | None:
        """The token that stands for all that no other does, if there is one."""
        word = getattr(self._tokenizer.model, "unk_token", None)
        number: int | None = self._tokenizer.token_to_id(word) if isinstance(word, str) else None
        return number


Vocabulary = Bytes | Characters | Tokens


def vocabulary_of(
    about: Mapping[str, Any], read: Callable[[str], bytes], where: str
) -> Vocabulary | None:
    """Return the vocabulary that an index speaks of, if it does; `read` gives a file that lies beside it."""
    level, letters, size = (about.get(name) for name in ("text", "characters", "vocabulary"))
    if level == "bytes":
        return Bytes()
    if level == "characters" and isinstance(letters, str) and letters:
        return Characters(letters)
    files = about.get("files")
    if (
        level != "tokens"
        or not isinstance(size, int)
        or not isinstance(files, dict)
        or TOKENIZER not in files
    ):
        return None
    content = read(TOKENIZER)
    if xxhash.xxh3_64_hexdigest(content) != files[TOKENIZER]:
        raise DataError(
            f"{where}/{TOKENIZER} has other bytes than were written",
            fix="bring it back from where it was made",
        )
    end = about.get("end_of_text")
    return Tokens(content, size, end if isinstance(end, int) else -1, f"{where}/{TOKENIZER}")


def _codes(text: str) -> Array:
    return numpy.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def width_for(vocabulary: int) -> str:
    """Return the narrowest type that holds so many different numbers.

    >>> [width_for(count) for count in (65, 256, 257, 50257, 200_000)]
    ['<u1', '<u1', '<u2', '<u2', '<u4']
    """
    return "<u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4"


def load_tokenizer(path: Path) -> Tokens:
    """Read the file of a tokenizer."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _no_tokenizer(str(path), error.strerror or error) from error
    return Tokens.of(content, str(path))


def read_tokenizer(content: bytes, where: str) -> Any:
    """Return a tokenizer that takes texts as they are: it neither cuts nor fills them."""
    tokenizers = _need("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise _no_tokenizer(where, error) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _no_tokenizer(where: str, why: object) -> DataError:
    return DataError(
        f"cannot read {where} as a tokenizer: {why}",
        fix="give a file that the tokenizers library has saved (tokenizer.json), or have one trained",
    )


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> str:
    """Return the file of a byte-level BPE tokenizer, trained on texts; the same for the same texts."""
    tokenizers = _need("tokenizers")
    inner = _need("tokenizers.pre_tokenizers").ByteLevel
    tokenizer = tokenizers.Tokenizer(_need("tokenizers.models").BPE())
    tokenizer.pre_tokenizer = inner(add_prefix_space=False)
    tokenizer.decoder = _need("tokenizers.decoders").ByteLevel()
    trainer = _need("tokenizers.trainers").BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=sorted(inner.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=True))


def _need(module: str) -> Any:
    from paceline.data.pack.optional_packages import (
        import_optional,
    )  # not above: whoever packs needs this module first

    return import_optional(module, "text as tokens")


def end_of_text(tokenizer: Any) -> int:
    """Return the token that ends a text, or -1 if there is none."""
    known = (tokenizer.token_to_id(word) for word in _ENDS)
    return next((number for number in known if number is not None), -1)
