"""The manifest of a checkpoint: files, checksums, settings.

It is written last: without it there is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from paceline.errors import BadCheckpoint, EnvironmentUnfit
from paceline.safe_open import parse_json

MANIFEST = "manifest.json"
FORMAT = 1
LONGEST_MANIFEST = 1 << 26
"""The most bytes of a manifest."""
_NO_MANIFEST = (ValueError, TypeError, KeyError, AttributeError)
_CHECKSUM = b',\n "xxh3": "'


@dataclass(frozen=True)
class FileFacts:
    """Length of a file, and the XXH3 checksum of its bytes (64 bits, 16 hexadecimal digits)."""

    size_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint contains, with a checksum for every file."""

    step: int
    samples: int
    files: Mapping[str, FileFacts]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Evaluation metrics at this step, if there was an evaluation."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """State that is not a tensor: JSON values of the trainer."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the run, by dotted name."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(facts.size_bytes for facts in self.files.values())

    def to_json(self) -> bytes:
        """Return the stored form: its last entry is the checksum of all bytes before it."""
        body = json.dumps({"format": FORMAT} | asdict(self), indent=1).encode().removesuffix(b"\n}")
        content = body + _end(body)
        if len(content) > LONGEST_MANIFEST:
            raise EnvironmentUnfit(
                f"the manifest of step {self.step} has {len(content):,} bytes; the limit is {LONGEST_MANIFEST:,}",
                fix="keep large values in tensors: run.track saves those beside the manifest",
            )
        return content

    @classmethod
    def from_json(cls, content: bytes, where: str) -> Manifest:
        """Parse a manifest; raise `NewerFormat`, or `BadCheckpoint` if any byte is wrong."""
        if len(content) > LONGEST_MANIFEST:
            raise damaged(where, f"its manifest has more than {LONGEST_MANIFEST:,} bytes")
        body, mark, _ = content.rpartition(_CHECKSUM)
        if not mark or content != body + _end(body):
            raise damaged(where, "its manifest has other bytes than were written")
        try:
            tree = parse_json(body + b"}")
            known = int(tree.pop("format"))
        except _NO_MANIFEST as error:
            raise damaged(where, f"its manifest is incomplete ({type(error).__name__})") from error
        if known > FORMAT:
            raise NewerFormat(where, known)
        try:
            files = {_plain(name): FileFacts(**facts) for name, facts in tree.pop("files").items()}
            return _checked(cls(files=files, **tree))
        except _NO_MANIFEST as error:
            raise damaged(where, f"its manifest is invalid ({error})") from error


def _checked(manifest: Manifest) -> Manifest:
    """Raise for entries of the wrong type."""
    if not manifest.files:
        raise ValueError("it lists no files")
    for number in (
        manifest.step,
        manifest.samples,
        *(facts.size_bytes for facts in manifest.files.values()),
    ):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r:.40} is not a count")
    for table in (manifest.metrics, manifest.values, manifest.config, manifest.versions):
        if not isinstance(table, dict):
            raise TypeError(f"{table!r:.40} is not a table")
    for name, value in manifest.metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"the metric {name} is {value!r:.40}, not a number")
    if not all(isinstance(facts.xxh3, str) for facts in manifest.files.values()):
        raise TypeError("a checksum is not a string")
    return manifest


class NewerFormat(BadCheckpoint):
    """A checkpoint of a later version of this program, which this version cannot verify."""

    def __init__(self, where: str, known: int) -> None:
        super().__init__(
            f"{where} has checkpoint format {known}; this version reads up to {FORMAT}",
            fix="update paceline, or start a new run with another name=",
        )


def damaged(where: str, why: str) -> BadCheckpoint:
    """Return the error for a checkpoint that must not be loaded."""
    return BadCheckpoint(
        f"{where} is damaged: {why}",
        fix="run `paceline ckpt check` to find an intact checkpoint; a training resumes from one by itself",
    )


def _end(body: bytes) -> bytes:
    return _CHECKSUM + xxhash.xxh3_64_hexdigest(body).encode() + b'"\n}'


def _plain(name: str) -> str:
    """Return a file name; raise if it leaves its folder."""
    if not name or name.startswith(".") or any(letter in name for letter in "/\\\0"):
        raise ValueError(f"file name {name!r}")
    return name
