"""How the commands of a lesson are run as they stand there: on this machine, also those for several nodes."""

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

_SETTING = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")
_OURS = {"python": (), "torchrun": ("-m", "torch.distributed.run"), "paceline": ("-m", "paceline")}
TOGETHER = {"TORCH_DIST_INIT_BARRIER": "1"}
"""A rank that has nothing to wait for must not leave while others are still connecting."""
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = {"salloc": "a Slurm cluster", "sbatch": "a Slurm cluster"}


@dataclass(frozen=True)
class LessonCommand:
    """One line of a lesson, ready to be run."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    times: int = 1
    """How often at once: an agent for each node."""

    @property
    def lacks(self) -> str:
        """What this machine does not have that it needs; empty: nothing."""
        program = Path(self.words[0]).name
        return "" if shutil.which(self.words[0]) else _ELSEWHERE.get(program, program)


def command_of(line: str, lesson: Lesson, port: int = 0) -> LessonCommand:
    """Return a line of a lesson as it is run here: with this Python's programs, this lesson's file, and a free port."""
    words, variables = shlex.split(line), {}
    while found := _SETTING.fullmatch(words[0]):
        variables[found[1]] = found[2]
        words = words[1:]
    if words[0] in _OURS:
        words = [sys.executable, *_OURS[words[0]], *words[1:]]
    here = {
        f"lessons/{lesson.path.name}": str(lesson.path),
        "HOST:29400": f"{_LOOPBACK}:{port or free_port(_LOOPBACK)}",
    }
    scripts = {f"lessons/{file.name}": str(file) for file in lesson.path.parent.glob("*.sh")}
    words = [(here | scripts).get(word, word) for word in words]
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    return LessonCommand(tuple(words), variables, nodes)


def play(command: LessonCommand, folder: Path) -> int:
    """Run a command in a folder, on as many nodes as it is for; return the first exit code that is not 0."""
    env = (
        os.environ
        | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PATH": _path()}
        | TOGETHER
    )
    if command.times > 1:
        env["CUDA_VISIBLE_DEVICES"] = ""  # agents on one machine would all take the same GPUs
    env |= command.variables
    with ExitStack() as stack:
        agents = [
            stack.enter_context(subprocess.Popen(command.words, cwd=folder, env=env))
            for _ in range(command.times)
        ]
        return worst(agent.wait() for agent in agents)


def _path() -> str:
    """Return where programs are looked for: first beside this Python, for a `python` that a job starts."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def worst(codes: Iterable[int]) -> int:
    """Return the first exit code that is not 0.

    >>> worst([0, 3, 1]), worst([0, 0])
    (3, 0)
    """
    return next((code for code in codes if code), 0)
