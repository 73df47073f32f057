"""Runs the commands of a lesson on this machine, also those for several nodes."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.course.catalog import Lesson
from paceline.terminal import plain
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
_POLL_S = 0.1
_SIZE = (50, 400)
"""Rows and columns of that terminal: wide, because lines are wrapped where they are shown."""
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


def run_command(command: LessonCommand, folder: Path, show: Callable[[str], None]) -> int:
    """Run a command in a folder, one copy per node, and show each line; return the first exit code that is not 0.

    Its output is a terminal of its own, so that lines come while they are written, and not when a rank ends.
    """
    env = os.environ | INIT_BARRIER | {"PATH": _path()}
    env.setdefault("OMP_NUM_THREADS", "1")
    env.pop("PYTHONUNBUFFERED", None)  # it would write the end of a line separately
    if command.nodes > 1:
        env["CUDA_VISIBLE_DEVICES"] = ""  # agents on one machine would use the same GPUs
    env |= command.variables
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, _SIZE)
    agents = []
    with ExitStack() as stack:
        stack.callback(os.close, ours)
        try:
            for _ in range(command.nodes):
                agent = subprocess.Popen(
                    command.argv, cwd=folder, env=env, stdout=theirs, stderr=theirs
                )
                agents.append(stack.enter_context(agent))
        finally:
            os.close(theirs)
        try:
            for line in _lines(ours, agents):
                show(line)
        except (
            KeyboardInterrupt
        ):  # the agents got it, too; what they still write must not block them
            for _ in _lines(ours, agents):
                pass
            raise
        return first_failure(agent.wait() for agent in agents)


def _lines(terminal: int, agents: Sequence[subprocess.Popen[bytes]]) -> Iterator[str]:
    """Yield the lines that are written to a terminal, until all agents have exited and nothing more comes."""
    rest, has_exited = b"", False
    while True:
        found = _read(terminal)
        *lines, rest = (rest + found).split(b"\n")
        yield from map(_visible, lines)
        if has_exited and not found:
            break
        # Only what is read after the exit is the end: their last lines may still be on the way.
        has_exited = all(agent.poll() is not None for agent in agents)
    if rest:
        yield _visible(rest)


def _read(terminal: int) -> bytes:
    """Return what comes within a moment, if anything."""
    ready, _, _ = select.select([terminal], [], [], _POLL_S)
    try:
        return os.read(terminal, 1 << 16) if ready else b""
    except OSError:  # Linux: all processes have closed it
        time.sleep(_POLL_S)
        return b""


def _visible(line: bytes) -> str:
    r"""Return what a terminal would show of a line: what stands after the last carriage return, without colours.

    >>> _visible(b"step 1/9\r\x1b[2Kepoch 1: loss 0.5\r")
    'epoch 1: loss 0.5'
    """
    text = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    return plain(text.expandtabs())


def _path() -> str:
    """Return PATH with the folder of this Python first, so that a batch job finds it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def first_failure(codes: Iterable[int]) -> int:
    """Return the first exit code that is not 0, or 0.

    >>> first_failure([0, 3, 1]), first_failure([0, 0])
    (3, 0)
    """
    return next((code for code in codes if code), 0)
