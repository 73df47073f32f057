"""Vocabularies: text as bytes, as characters, or as tokens of a tokenizer."""

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
from paceline.safe_open import read_bytes

TOKENIZER = "tokenizer.json"
"""The file of a tokenizer, in the folder of the dataset or run that uses it."""
SMALLEST_VOCABULARY = 257
"""Every byte and the end of text: the least that a trained tokenizer holds."""

_END_OF_TEXT = "<|endoftext|>"
_ENDS = (_END_OF_TEXT, "<|end_of_text|>", "<|eos|>", "<eos>", "</s>")

Level = Literal["bytes", "characters", "tokens"]


@dataclass(frozen=True)
class Bytes:
    """Every token is a byte of UTF-8."""

    level: ClassVar[Level] = "bytes"
    size: ClassVar[int] = 256
    end: ClassVar[int] = -1
    files: ClassVar[Mapping[str, bytes]] = {}

    def encode(self, text: str) -> Array:
        """Return the tokens of a text."""
        return numpy.frombuffer(text.encode(), dtype="u1")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; invalid UTF-8 becomes replacement characters."""
        return bytes(tokens).decode(errors="replace")

    def about(self) -> dict[str, Any]:
        """Return the entries of the index that describe this vocabulary."""
        return {"text": self.level, "vocabulary": self.size}


@dataclass(frozen=True)
class Characters:
    """Every token is a character, numbered by its position in `letters`."""

    letters: str
    """All characters, in order."""
    level: ClassVar[Level] = "characters"
    end: ClassVar[int] = -1
    files: ClassVar[Mapping[str, bytes]] = {}

    @property
    def size(self) -> int:
        """The number of characters."""
        return len(self.letters)

    def encode(self, text: str) -> Array:
        """Return the tokens of a text.

        The error names a character that is not in the vocabulary.
        """
        letters, codes = _codes(self.letters), _codes(text)
        tokens = numpy.searchsorted(letters, codes)
        unknown = letters.take(tokens, mode="clip") != codes
        if unknown.any():
            letter = text[int(unknown.argmax())]
            raise ConfigError(
                f"the character {letter!r} is not in the vocabulary of {self.size} characters",
                fix=f"remove it, or use only these: {self.letters[:200]!r}",
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.letters[token] for token in tokens)

    def about(self) -> dict[str, Any]:
        """Return the entries of the index that describe this vocabulary."""
        return {"text": self.level, "vocabulary": self.size, "characters": self.letters}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a tokenizer."""

    content: bytes
    """The tokenizer file.

    It is parsed when text is encoded or decoded: tokens alone need no package.
    """
    size: int
    end: int = -1
    """The end-of-text token; -1: none."""
    where: str = field(default=TOKENIZER, compare=False)
    level: ClassVar[Level] = "tokens"

    @classmethod
    def of(cls, content: bytes, where: str = TOKENIZER) -> Tokens:
        """Parse the content of a tokenizer file."""
        tokenizer = read_tokenizer(content, where)
        size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return cls(content, size, end_of_text(tokenizer), where)

    @property
    def files(self) -> Mapping[str, bytes]:
        """Files to keep in the folder of the tokens."""
        return {TOKENIZER: self.content}

    def encode(self, text: str) -> Array:
        """Return the tokens of a text."""
        return numpy.asarray(
            self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=numpy.int64
        )

    def first_unencodable(self, text: str) -> str:
        """Return the first character that no token covers, other than white space.

        "" if there is none.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        covered: set[int] = set()
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token != self._unknown:
                covered.update(range(begin, end))
        for position, letter in enumerate(text):
            if position not in covered and not letter.isspace():
                return letter
        return ""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def about(self) -> dict[str, Any]:
        """Return the entries of the index that describe this vocabulary."""
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
        """The token for unknown text, if there is one."""
        name = getattr(self._tokenizer.model, "unk_token", None)
        token: int | None = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
        return token


Vocabulary = Bytes | Characters | Tokens


def vocabulary_of(
    about: Mapping[str, Any], read: Callable[[str], bytes], where: str
) -> Vocabulary | None:
    """Return the vocabulary that an index describes, if any.

    `read` returns a file in its folder.
    """
    level, letters, size = (about.get(name) for name in ("text", "characters", "vocabulary"))
    if level == "bytes":
        return Bytes()
    if level == "characters" and isinstance(letters, str) and letters:
        return Characters(letters)
    files = about.get("files")
    if level != "tokens" or not isinstance(size, int):
        return None
    if not isinstance(files, dict) or TOKENIZER not in files:
        return None
    content = read(TOKENIZER)
    if xxhash.xxh3_64_hexdigest(content) != files[TOKENIZER]:
        raise DataError(
            f"{where}/{TOKENIZER} has changed since it was written",
            fix="copy the original file back",
        )
    end = about.get("end_of_text")
    return Tokens(content, size, end if isinstance(end, int) else -1, f"{where}/{TOKENIZER}")


def _codes(text: str) -> Array:
    return numpy.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def width_for(vocabulary: int) -> str:
    """Return the narrowest type that holds the tokens of a vocabulary of this size.

    >>> [width_for(count) for count in (65, 256, 257, 50257, 200_000)]
    ['<u1', '<u1', '<u2', '<u2', '<u4']
    """
    return "<u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4"


def load_tokenizer(path: Path) -> Tokens:
    """Read a tokenizer file."""
    try:
        content = read_bytes(path, 1 << 28, links=True)
    except OSError as error:
        raise _no_tokenizer(str(path), error.strerror or error) from error
    return Tokens.of(content, str(path))


def read_tokenizer(content: bytes, where: str) -> Any:
    """Parse a tokenizer, without its truncation and padding."""
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
        fix="pass a file that the tokenizers library has saved (tokenizer.json), or train a tokenizer",
    )


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> str:
    """Train a byte-level BPE tokenizer and return its file; the same texts give the same file."""
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
    # Not at the top: the package of this module imports vocabulary first.
    from paceline.data.pack.optional_packages import import_optional

    return import_optional(module, "text as tokens")


def end_of_text(tokenizer: Any) -> int:
    """Return the end-of-text token, or -1 if there is none."""
    for name in _ENDS:
        token: int | None = tokenizer.token_to_id(name)
        if token is not None:
            return token
    return -1
