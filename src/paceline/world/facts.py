"""Who this process is among its peers: facts, read once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Launcher = Literal["alone", "paceline", "torchrun", "slurm", "openmpi", "pmi"]


@dataclass(frozen=True)
class FileMeeting:
    """Ranks of one machine meet in a file of a private folder; no port is opened."""

    path: Path


@dataclass(frozen=True)
class TcpMeeting:
    """Ranks of several machines meet at one address; `serve` says that this rank listens there."""

    host: str
    port: int
    serve: bool
    prefix: str


@dataclass(frozen=True)
class World:
    """Who this process is, and how many there are."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: Launcher = "alone"
    meeting: FileMeeting | TcpMeeting | None = None
    device: str = "cpu"
    deadline_s: float = math.inf
    """The moment at which whoever started this process will end it, in seconds since 1970."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and speaks for all."""
        return self.rank == 0
