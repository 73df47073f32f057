"""What to start, and how often."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import handover
from paceline.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Program:
    """A script, or a module of this package; `argv` is how `rank_local` runs it."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class LaunchSpec:
    """N ranks of one program on this machine, which may be one of several."""

    target: Program
    ranks: int
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = math.inf
    """The moment by which the ranks must have saved and left, in seconds since 1970."""
    node: int = 0
    """Which of the hosts this one is."""
    nodes: int = 1
    """Hosts on which the same is started, each with as many ranks."""
    address: str = ""
    """Where the ranks of several hosts meet, as HOST:PORT; the host is that of node 0."""
    attempt: int = 0
    """How often it was started before."""

    def __post_init__(self) -> None:
        """Refuse a world that cannot be."""
        if self.ranks < 1:
            raise ConfigError(f"{self.ranks} ranks cannot train", fix="start at least one: -n 1")
        if not 0 <= self.node < self.nodes:
            raise ConfigError(
                f"--node {self.node} is not one of {self.nodes} hosts",
                fix=f"number the hosts from 0 to {max(self.nodes, 1) - 1}, each with the same --nodes",
            )
        if (self.nodes > 1) != bool(self.address):
            raise ConfigError(
                f"--nodes {self.nodes} {'needs' if self.nodes > 1 else 'takes no'} place to meet",
                fix="give every host the same --nodes N --rendezvous HOST:PORT, HOST being the one with --node 0",
            )

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return what all ranks are told, wherever they start, in the words of the environment."""
        told = {handover.ATTEMPT: str(self.attempt)}
        # Each rank sets torch's threads itself; without this, NumPy would take all cores in each.
        told["OMP_NUM_THREADS"] = env.get("OMP_NUM_THREADS", "1")
        if self.settings:
            around = json.loads(env.get(handover.SETTINGS) or "{}")
            told[handover.SETTINGS] = json.dumps(around | dict(self.settings))
        if math.isfinite(self.deadline_s):
            told[handover.DEADLINE] = str(self.deadline_s)
        return told

    @property
    def size(self) -> int:
        """How many ranks there are on all hosts."""
        return self.ranks * self.nodes

    @property
    def numbers(self) -> range:
        """The ranks of this host."""
        return range(self.node * self.ranks, (self.node + 1) * self.ranks)


def script(path: str) -> Program:
    """Return the target for a script, or say that it is not there."""
    file = Path(path)
    if file.is_file():
        return Program(file.name, ("path", str(file)))
    beside = [str(found) for found in file.parent.glob("*.py")] if file.parent.is_dir() else []
    fix = (
        did_you_mean(path, beside)
        if beside
        else "check the path; a built-in recipe starts with `paceline train NAME`"
    )
    raise ConfigError(f"there is no script {path}", fix=fix)


def module(name: str, dotted: str) -> Program:
    """Return the target for a module."""
    return Program(name, ("module", dotted))
