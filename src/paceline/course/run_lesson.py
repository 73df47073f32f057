"""Runs the commands of a lesson on this machine, also those for several nodes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.course.catalog import Lesson
from paceline.world.address import free_port

_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")
_PROGRAMS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "paceline": ("-m", "paceline"),
}
INIT_BARRIER = {"TORCH_DIST_INIT_BARRIER": "1"}
"""Makes a rank wait until all ranks are connected, so that none exits too early."""
_LOOPBACK = "127.0.0.1"
_NEEDS = {"salloc": "a Slurm cluster", "sbatch": "a Slurm cluster"}


@dataclass(frozen=True)
class LessonCommand:
    """One command of a lesson, ready to run."""

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    nodes: int = 1
    """Copies that run at once: one agent per node."""

    @property
    def missing(self) -> str:
        """What this command needs and this machine does not have; empty if it can run."""
        program = Path(self.argv[0]).name
        return "" if shutil.which(self.argv[0]) else _NEEDS.get(program, program)


def command_of(line: str, lesson: Lesson, port: int = 0) -> LessonCommand:
    """Return a command line of a lesson with this Python, the path of the file, and a free port."""
    argv, variables = shlex.split(line), {}
    while match := _VARIABLE.fullmatch(argv[0]):
        variables[match[1]] = match[2]
        argv = argv[1:]
    if argv[0] in _PROGRAMS:
        argv = [sys.executable, *_PROGRAMS[argv[0]], *argv[1:]]
    local = {"HOST:29400": f"{_LOOPBACK}:{port or free_port(_LOOPBACK)}"}
    for file in (lesson.path, *lesson.path.parent.glob("*.sh")):
        local[f"lessons/{file.name}"] = str(file)
    argv = [local.get(argument, argument) for argument in argv]
    nodes = int(argv[argv.index("--nnodes") + 1]) if "--nnodes" in argv else 1
    return LessonCommand(tuple(argv), variables, nodes)


def run_command(command: LessonCommand, folder: Path) -> int:
    """Run a command in a folder, one copy per node; return the first exit code that is not 0."""
    env = os.environ | INIT_BARRIER | {"PATH": _path()}
    env.setdefault("OMP_NUM_THREADS", "1")
    if command.nodes > 1:
        env["CUDA_VISIBLE_DEVICES"] = ""  # agents on one machine would use the same GPUs
    env |= command.variables
    agents = []
    with ExitStack() as stack:
        for _ in range(command.nodes):
            agent = subprocess.Popen(command.argv, cwd=folder, env=env)
            agents.append(stack.enter_context(agent))
        return first_failure(agent.wait() for agent in agents)


def _path() -> str:
    """Return PATH with the folder of this Python first, so that a batch job finds it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def first_failure(codes: Iterable[int]) -> int:
    """Return the first exit code that is not 0, or 0.

    >>> first_failure([0, 3, 1]), first_failure([0, 0])
    (3, 0)
    """
    return next((code for code in codes if code), 0)
