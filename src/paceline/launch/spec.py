"""The program to launch, the number of ranks, and their environment."""

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
    """A script, or a module of this package."""

    name: str
    argv: tuple[str, ...]
    """Arguments of `rank_local` and `rank_srun`: "path" SCRIPT or "module" NAME."""


@dataclass(frozen=True)
class LaunchSpec:
    """N ranks of one program on this host, which may be one of several."""

    target: Program
    ranks: int
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = math.inf
    """The moment by which the ranks must have saved and exited, in seconds since 1970."""
    node: int = 0
    """The number of this host."""
    nodes: int = 1
    """The number of hosts that run the same command, each with as many ranks."""
    address: str = ""
    """The rendezvous of several hosts, as HOST:PORT; HOST is node 0."""
    attempt: int = 0
    """The number of launches before this one."""

    def __post_init__(self) -> None:
        """Refuse an impossible world."""
        if self.ranks < 1:
            raise ConfigError(
                f"the number of ranks must be at least 1, got {self.ranks}", fix="set -n 1 or more"
            )
        if not 0 <= self.node < self.nodes:
            last = max(self.nodes, 1) - 1
            raise ConfigError(
                f"--node must be between 0 and {last} with --nodes {self.nodes}, got {self.node}",
                fix=f"number the hosts from 0 to {last}, each with the same --nodes",
            )
        if (self.nodes > 1) != bool(self.address):
            state = "needs" if self.nodes > 1 else "does not take"
            raise ConfigError(
                f"--nodes {self.nodes} {state} --rendezvous",
                fix="pass the same --nodes N --rendezvous HOST:PORT on every host, where HOST is the one with --node 0",
            )

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that all ranks need, wherever they start."""
        variables = {handover.ATTEMPT: str(self.attempt)}
        # Each rank sets torch's threads itself; without this, NumPy would use all cores in each.
        variables["OMP_NUM_THREADS"] = env.get("OMP_NUM_THREADS", "1")
        if self.settings:
            outer = json.loads(env.get(handover.SETTINGS) or "{}")
            variables[handover.SETTINGS] = json.dumps(outer | dict(self.settings))
        if math.isfinite(self.deadline_s):
            variables[handover.DEADLINE] = str(self.deadline_s)
        return variables

    @property
    def size(self) -> int:
        """The number of ranks on all hosts."""
        return self.ranks * self.nodes

    @property
    def numbers(self) -> range:
        """The ranks of this host."""
        return range(self.node * self.ranks, (self.node + 1) * self.ranks)


def script(path: str) -> Program:
    """Return the program for a script; raise if the file does not exist."""
    file = Path(path)
    if file.is_file():
        return Program(file.name, ("path", str(file)))
    neighbours = list(map(str, file.parent.glob("*.py"))) if file.parent.is_dir() else []
    fix = "check the path; start a built-in recipe with `paceline train NAME`"
    if neighbours:
        fix = did_you_mean(path, neighbours)
    raise ConfigError(f"script {path} does not exist", fix=fix)


def module(name: str, dotted: str) -> Program:
    """Return the program for a module."""
    return Program(name, ("module", dotted))
