"""The program to launch, the number of ranks, and their environment."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import handover
from paceline.errors import ConfigError, did_you_mean

_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
ANOTHER_PYTHON = "python"
"""The first argument of `rank_srun` if an interpreter and a script follow."""


@dataclass(frozen=True)
class Program:
    """A script, or a module of this package."""

    name: str
    argv: tuple[str, ...]
    """Arguments of `rank_local` and `rank_srun`: "path" SCRIPT or "module" NAME."""
    interpreter: str = ""
    """Another Python interpreter, which need not have Paceline; empty: this one."""
    foreign: bool = False
    """Whether it is a script that does not mention Paceline, so that nothing is known of its checkpoints."""
    told: str = ""
    """The value of `handover.SCRIPT`, if the file is a copy or a cell; else empty."""

    @property
    def command(self) -> list[str]:
        """The command line of a rank on this machine, up to the arguments of the script.

        >>> Program("x.py", ("path", "x.py")).command[1:]
        ['-u', '-m', 'paceline.launch.rank_local', 'path', 'x.py']
        """
        start = [sys.executable, "-u", "-m"]
        if self.interpreter:
            return [*start, "paceline.launch.rank_foreign", self.interpreter, *self.argv[1:]]
        return [*start, "paceline.launch.rank_local", *self.argv]


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
    folder: str = ""
    """The run folder that the launcher keeps for a script without one; empty: the script keeps its own."""
    most_ranks: int = 0
    """The most ranks of all starts of this run, for which a new run has enough lanes; 0: those of this start."""
    max_restarts: int = 0
    """The most restarts in a row, for scripts that ask torchrun's variable."""
    import_from: str = ""
    """A folder of modules that the script may import, besides its own folder; empty: none."""
    command: str = ""
    """What the user typed, without secrets."""

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
        # Otherwise torch.compile starts a process per core in each.
        variables[_COMPILE_THREADS] = env.get(_COMPILE_THREADS, str(_cores_per_rank(self.ranks)))
        # Else the order of a set of strings, and what a script makes of it, differs on every rank.
        seed = self._seed
        variables[handover.HASH_SEED] = env.get(handover.HASH_SEED) or str(seed % 2**32)
        if not self.target.foreign:
            variables[handover.SEED] = str(seed)
            # The watchdog names a hang and ends its ranks; C++ stacks of torch around that would hide it. torch reads
            # the variable at its import.
            variables["TORCH_CPP_LOG_LEVEL"] = env.get("TORCH_CPP_LOG_LEVEL", "FATAL")
        if self.import_from:
            outer_path = env.get("PYTHONPATH", "")
            folders = [self.import_from, *([outer_path] if outer_path else [])]
            variables["PYTHONPATH"] = os.pathsep.join(folders)
        if self.settings:
            outer = json.loads(env.get(handover.SETTINGS) or "{}")
            variables[handover.SETTINGS] = json.dumps(outer | dict(self.settings))
            if self.target.foreign:
                variables[handover.NEEDS_RUN] = "1"
        if self.target.told:
            variables[handover.SCRIPT] = self.target.told
        if self.command:
            variables[handover.COMMAND] = self.command
        if self.most_ranks > self.size:
            variables[handover.MOST_RANKS] = str(self.most_ranks)
        if math.isfinite(self.deadline_s):
            variables[handover.DEADLINE] = str(self.deadline_s)
        return variables

    @property
    def _seed(self) -> int:
        from paceline.config.parse import seed_in_words  # a rank under srun need not import it

        words = [f"{name}={value}" for name, value in self.settings.items() if name == "seed"]
        return seed_in_words([*self.arguments, *words])

    @property
    def size(self) -> int:
        """The number of ranks on all hosts."""
        return self.ranks * self.nodes

    @property
    def numbers(self) -> range:
        """The ranks of this host."""
        return range(self.node * self.ranks, (self.node + 1) * self.ranks)


def _cores_per_rank(ranks: int) -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (usable or 1) // ranks)


def script(path: str, python: str = "") -> Program:
    """Return the program for a script; raise if the file, or another interpreter for it, does not exist."""
    file = Path(path)
    if file.is_file():
        foreign = bool(python) or b"paceline" not in file.read_bytes()
        interpreter = _interpreter(python) if python else ""
        return Program(file.name, ("path", str(file)), interpreter, foreign)
    if file.is_dir():
        raise ConfigError(
            f"{path} is a folder, not a script", fix=f"name the script in it: {file / 'train.py'}"
        )
    neighbours = list(map(str, file.parent.glob("*.py"))) if file.parent.is_dir() else []
    fix = "check the path; start a built-in recipe with `paceline train NAME`"
    if neighbours:
        fix = did_you_mean(path, neighbours)
    raise ConfigError(f"script {path} does not exist", fix=fix)


def _interpreter(python: str) -> str:
    """Return the absolute path of an interpreter; links stay, because those of a venv name its packages."""
    if found := shutil.which(python):
        return str(Path(found).absolute())
    raise ConfigError(
        f"--python {python} is not an executable file",
        fix="give the path of a Python interpreter, such as --python /opt/env/bin/python",
    )


def module(name: str, dotted: str) -> Program:
    """Return the program for a module."""
    return Program(name, ("module", dotted))
