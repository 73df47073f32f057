"""Who this process is among its peers: facts, read once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Launcher = Literal["alone", "paceline", "torchrun", "slurm", "openmpi", "pmi"]


@dataclass(frozen=True)
class FileRendezvous:
    """Ranks of one machine meet in a file of a private folder; no port is opened."""

    path: Path


@dataclass(frozen=True)
class TcpRendezvous:
    """Ranks of several machines meet at one address; `serve` says that this rank listens there."""

    host: str
    port: int
    serve: bool
    prefix: str


@dataclass(frozen=True)
class PublishedRendezvous:
    """Ranks of several machines meet where rank 0 says, in a file that all see: `serve` says that this rank is it."""

    key: str
    host: str
    """The name of this rank's node; empty: whatever the machine calls itself."""
    peers: tuple[str, ...]
    """The other nodes. Where none is known, and the host is, somebody has chosen that address."""
    serve: bool


Meeting = FileRendezvous | TcpRendezvous | PublishedRendezvous


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
    meeting: Meeting | None = None
    device: str = "cpu"
    deadline_s: float = math.inf
    """The moment at which whoever started this process will end it, in seconds since 1970."""
    interface: str = ""
    """The network interface that carries the traffic between nodes; empty: the one that leads to the peers."""
    incarnation: str = ""
    """Which start of a job this is, as FAMILY:NUMBER; empty: nothing is known of others."""
    launch: str = ""
    """Which launch or job this is a start of; all its starts have the same."""
    is_restart: bool = False
    """Whether an earlier start of it came before."""
    progress_file: Path | None = None
    """Where rank 0 writes the step of its newest checkpoint, for whoever starts the run again."""
    launcher_file: Path | None = None
    """Beside this file the ranks of our own launcher leave word for it (see `handover`); None under any other."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and speaks for all."""
        return self.rank == 0
