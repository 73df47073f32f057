"""The identity of this process among its peers: facts, read once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Launcher = Literal["alone", "paceline", "torchrun", "slurm", "openmpi", "pmi"]


@dataclass(frozen=True)
class FileRendezvous:
    """A file in a private folder, for ranks of one machine; no port is opened."""

    path: Path


@dataclass(frozen=True)
class TcpRendezvous:
    """One address, for ranks of several machines; `serve`: this rank listens there."""

    host: str
    port: int
    serve: bool
    prefix: str


@dataclass(frozen=True)
class PublishedRendezvous:
    """An address that rank 0 publishes in a shared file, for ranks of several machines; `serve`: this rank is rank 0."""

    key: str
    host: str
    """The name of this rank's node; empty: the host name."""
    peers: tuple[str, ...]
    """The other nodes. If they are unknown and the host is known, a person has chosen that address."""
    serve: bool


Rendezvous = FileRendezvous | TcpRendezvous | PublishedRendezvous


@dataclass(frozen=True)
class World:
    """Rank, world size and environment of this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: Launcher = "alone"
    rendezvous: Rendezvous | None = None
    device: str = "cpu"
    deadline_s: float = math.inf
    """The moment at which the launcher or scheduler will kill this process, in seconds since 1970."""
    interface: str = ""
    """The network interface between nodes; empty: the one with the route to the peers."""
    incarnation: str = ""
    """The number of this start of a job, as FAMILY:NUMBER; empty: unknown."""
    launch: str = ""
    """The launch or job; equal for all its starts."""
    is_restart: bool = False
    """Whether the launch or job was started before."""
    most_size: int = 0
    """The largest world that this launch asks for; 0: this one."""
    progress_file: Path | None = None
    """The file in which rank 0 writes the step of its newest checkpoint, for the launcher."""
    launcher_file: Path | None = None
    """The ranks of our own launcher write its marks beside this file (see `handover`); None under other launchers."""

    secret_file: Path | None = None
    """The file with the secret of the job, for ranks of several nodes that share no run folder."""
    signing_key: bytes = field(default=b"", repr=False)
    """The key that signs messages between nodes; empty: they are not signed."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and messages for all."""
        return self.rank == 0
