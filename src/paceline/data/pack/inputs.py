"""What can be packed: something whose samples are read by their numbers, in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline.data.shards.shard import Rows

Progress = Callable[[str, int, int], None]
"""Hears what is being done, how much of it is done, and how much there is."""


class Input(Protocol):
    """Numbered samples. It can be told to another process."""

    @property
    def samples(self) -> int:
        """How many there are."""

    def read(self, begin: int, end: int) -> Rows:
        """Return some samples; whoever reads them, they are the same."""

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""


@dataclass(frozen=True)
class Prepared:
    """An input that is ready to be read."""

    input: Input
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the index will say of it."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Files that go into the set beside the shards: their names, and where they are."""


class PackContext(NamedTuple):
    """Where and with whom an input is made ready."""

    spool: Path
    """A folder for what has to be made first; it stays until the set is whole."""
    workers: int
    progress: Progress


def silent(what: str, done: int, total: int) -> None:
    """Say nothing of progress."""
