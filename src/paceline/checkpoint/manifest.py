"""What a checkpoint says of itself. It is written last: a checkpoint without it does not exist."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from paceline.errors import BadCheckpoint

MANIFEST = "manifest.json"
FORMAT = 1
_NO_MANIFEST = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_SUM = b',\n "xxh3": "'


@dataclass(frozen=True)
class FileFacts:
    """What a file must be: its length, and the XXH3 sum of its bytes (64 bits, as 16 hexadecimal digits)."""

    size_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and a sum for every byte of it."""

    step: int
    samples: int
    files: Mapping[str, FileFacts]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The evaluation at this step, if there was one."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What is not a tensor: numbers and words of the one who saved, as JSON."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the run, by dotted name."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(facts.size_bytes for facts in self.files.values())

    def to_json(self) -> bytes:
        """Return the manifest as it is stored: its last entry is the sum of all bytes before it."""
        body = json.dumps({"format": FORMAT} | asdict(self), indent=1).encode().removesuffix(b"\n}")
        return body + _end(body)

    @classmethod
    def from_json(cls, content: bytes, where: str) -> Manifest:
        """Read a manifest; refuse a newer format, and say so when it is none."""
        body, mark, _ = content.rpartition(_SUM)
        if not mark or content != body + _end(body):
            raise damaged(where, "its manifest has other bytes than were written")
        try:
            tree = json.loads(body + b"}")
            known = int(tree.pop("format"))
        except _NO_MANIFEST as error:
            raise damaged(where, f"its manifest is not whole ({type(error).__name__})") from error
        if known > FORMAT:
            raise NewerFormat(where, known)
        try:
            files = {_plain(name): FileFacts(**facts) for name, facts in tree.pop("files").items()}
            return _checked(cls(files=files, **tree))
        except _NO_MANIFEST as error:
            raise damaged(where, f"its manifest lacks something ({error})") from error


def _checked(manifest: Manifest) -> Manifest:
    """Refuse entries of another kind than their names promise."""
    for number in (
        manifest.step,
        manifest.samples,
        *(facts.size_bytes for facts in manifest.files.values()),
    ):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is not a count")
    for table in (manifest.metrics, manifest.values, manifest.config, manifest.versions):
        if not isinstance(table, dict):
            raise TypeError(f"{table!r} is not a table")
    if not all(isinstance(facts.xxh3, str) for facts in manifest.files.values()):
        raise TypeError("a sum is not a text")
    return manifest


class NewerFormat(BadCheckpoint):
    """A checkpoint of a later version of this program: good perhaps, but not for us to judge."""

    def __init__(self, where: str, known: int) -> None:
        super().__init__(
            f"{where} has checkpoint format {known}; this version reads up to {FORMAT}",
            fix="update paceline, or give the run another name to start anew",
        )


def damaged(where: str, why: str) -> BadCheckpoint:
    """Return the error for a checkpoint that must not be loaded."""
    return BadCheckpoint(
        f"{where} is damaged: {why}",
        fix="an older checkpoint is taken instead where there is one; `paceline ckpt check` looks at all of them",
    )


def _end(body: bytes) -> bytes:
    return _SUM + xxhash.xxh3_64_hexdigest(body).encode() + b'"\n}'


def _plain(name: str) -> str:
    """Return a file name that stays inside its folder."""
    if not name or name.startswith(".") or any(letter in name for letter in "/\\\0"):
        raise ValueError(f"file name {name!r}")
    return name
