"""The interface of an input: samples that any process can read by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline.data.shards.shard import Rows

Progress = Callable[[str, int, int], None]
"""Receives a label, the units done, and the total."""


class Input(Protocol):
    """Numbered samples, which can be sent to another process as JSON."""

    @property
    def samples(self) -> int:
        """The number of samples."""

    def read(self, begin: int, end: int) -> Rows:
        """Return some samples, the same in every process."""

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""


@dataclass(frozen=True)
class Prepared:
    """An input whose samples can be read."""

    input: Input
    about: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the index."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Files to copy into the dataset beside the shards: path by name."""


class PackContext(NamedTuple):
    """Where and with how many workers an input is prepared."""

    spool: Path
    """Folder for intermediate files; removed once the dataset is complete."""
    workers: int
    progress: Progress


def silent(what: str, done: int, total: int) -> None:
    """Ignore progress."""
