"""The commands of a batch script that start ranks: by which launcher, and how many."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from paceline.doctor.batch_parser import MARKED, Command, Script, options_of, read_script

_STARTERS = {
    "srun": "srun",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
    "ssh": "ssh",
    "pdsh": "ssh",
    "clush": "ssh",
}
_SHELLS = {"bash", "sh", "zsh", "dash"}
_PYTHON = re.compile(r"python[\d.]*$|:-python[\d.]*\}$")
_AGENT = re.compile(r"(^|/|:-)torchrun\}?$")
_AGENT_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
_MAX_DEPTH = 4  # of variables that refer to variables, or to themselves
_MAX_FACTORS = 4
_MAX_DIGITS = 9


@dataclass(frozen=True)
class Launch:
    """A command that starts ranks, or a torchrun agent that does."""

    command: Command
    through: str
    """srun, mpirun, ssh; empty: the batch shell itself."""
    kind: str
    """agent (torchrun, accelerate), python, paceline, or other: an unknown program."""
    asked: dict[str, str] = field(default_factory=dict)
    """The options of srun."""
    options: dict[str, str] = field(default_factory=dict)
    """The options of the agent."""
    inner: Script | None = None
    """The script that `bash -c` runs in each task."""

    @property
    def line(self) -> int:
        """Its line in the batch script."""
        return self.command.line

    @property
    def text(self) -> str:
        """The whole command."""
        return " ".join(self.command.words)


def launches_of(script: Script) -> list[Launch]:
    """Return the commands that start ranks; unknown programs only if srun or mpirun starts them."""
    launches: list[Launch] = []
    for command in script.commands:
        launches += _launch(command)
    return [launch for launch in launches if launch.kind != "other" or launch.through]


def _launch(command: Command) -> Iterator[Launch]:
    name = PurePath(command.words[0]).name
    through = _STARTERS.get(name, "")
    asked, rest = options_of(command.words[1:]) if through else ({}, list(command.words))
    kind, options, inner = _kind(rest, through)
    if kind:
        yield Launch(command, through, kind, asked, options, inner)


def _kind(words: list[str], through: str) -> tuple[str, dict[str, str], Script | None]:  # noqa: PLR0911 - one return per kind
    """Return kind, agent options and inner script of a program, also inside containers and wrappers."""
    for index, word in enumerate(words):
        name = PurePath(word).name
        if _AGENT.search(word) or word in _AGENT_MODULES:
            return _agent(words[index + 1 :])
        if name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
            return _agent(words[index + 2 :])
        if name == "paceline" or word.startswith("paceline."):
            return "paceline", {}, None
        if name in _SHELLS and "-c" in words[index + 1 : index + 3]:
            return _of_shell(words[words.index("-c", index) + 1 :])
        if _PYTHON.search(name):
            module = words[words.index("-m", index) + 1] if "-m" in words[index:-1] else ""
            if module in _AGENT_MODULES or module.startswith("paceline."):
                continue
            return "python", {}, None
        if not through:  # the batch shell runs only the first word
            return "", {}, None
    return ("other" if words and through == "srun" else ""), {}, None


def _agent(words: list[str]) -> tuple[str, dict[str, str], None]:
    options = options_of(words)[0]
    known = {
        "main-process-ip": "master-addr",
        "main-process-port": "master-port",
        "num-machines": "nnodes",
    }
    return "agent", {known.get(name, name): value for name, value in options.items()}, None


def _of_shell(words: list[str]) -> tuple[str, dict[str, str], Script | None]:
    if not words:
        return "other", {}, None
    inner = read_script(words[0].replace(MARKED, ""))
    for command in inner.commands:
        kind, options, _ = _kind(list(command.words), "")
        if kind:
            return kind, options, inner
    return "other", {}, inner


def nodes_of(script: Script, launch: Launch | None = None, depth: int = _MAX_DEPTH) -> int:
    """Return the number of nodes of a launch, else of the job, else 1."""
    asked = launch.asked.get("nodes", "") if launch else ""
    return (
        number(script, asked, depth)
        or number(script, script.value("nodes").partition("-")[0], depth)
        or 1
    )


def tasks_per_node(script: Script, launch: Launch | None = None, depth: int = _MAX_DEPTH) -> int:
    """Return the tasks per node that srun starts, by its own options, else by those of the job."""
    nodes = nodes_of(script, launch, depth)
    for options in (
        launch.asked if launch else {},
        {name: value for name, (value, _) in script.options.items()},
    ):
        if each := number(script, options.get("ntasks-per-node", ""), depth):
            return each
        if whole := number(script, options.get("ntasks", ""), depth):
            return math.ceil(whole / nodes)
    gpus, per_task = _count(_gpus_of_node(script)), _count(script.value("gpus-per-task"))
    return gpus // per_task or 1 if gpus and per_task else 1


def gpus_per_node(script: Script) -> int:
    r"""Return the GPUs per node that a job requests; 0 if it does not tell.

    >>> gpus_per_node(read_script("#SBATCH -N 2 -G 8"))
    4
    >>> gpus_per_node(read_script("#SBATCH --gres=gpu:a100:4,lscratch:10"))
    4
    """
    if each := _count(_gpus_of_node(script)):
        return each
    if per_task := _count(script.value("gpus-per-task")):
        return per_task * tasks_per_node(script)
    whole, nodes = _count(script.value("gpus")), nodes_of(script)
    return whole // nodes if whole % nodes == 0 else 0


def _gpus_of_node(script: Script) -> str:
    """Return the option with the GPUs of each node; `--gres` may request other things as well."""
    gres = [part for part in script.value("gres").split(",") if part.startswith("gpu")]
    return script.value("gpus-per-node") or next(iter(gres), "")


def tasks_of(script: Script, launch: Launch | None = None, depth: int = _MAX_DEPTH) -> int:
    """Return the total number of tasks that srun starts."""
    whole = number(
        script, (launch.asked if launch else {}).get("ntasks", "") or script.value("ntasks"), depth
    )
    return whole or nodes_of(script, launch, depth) * tasks_per_node(script, launch, depth)


def number(script: Script, text: str, depth: int = _MAX_DEPTH) -> int | None:
    r"""Return the number that a word expands to, if script and options define it.

    >>> script = read_script("#SBATCH -N 2 --ntasks-per-node=4\nG=4")
    >>> number(script, "8"), number(script, "$SLURM_NNODES"), number(script, "${X:-3}")
    (8, 2, 3)
    >>> number(script, "$((SLURM_NNODES * $G))"), number(script, "$(hostname)")
    (8, None)
    """
    word = text.strip().strip('"')
    if word.isdecimal():
        return _plain(word)
    if depth and (product := re.fullmatch(r"\$\(\((.*)\)\)", word)):
        return _product(script, product[1].split("*"), depth - 1)
    match = re.fullmatch(r"\$\{?(\w+)(?::-([^}]*))?\}?", word)
    if not match or not depth:
        return None
    name, default = match[1], match[2] or ""
    if variable := script.last(name):
        return number(script, variable.value, depth - 1)
    return _of_slurm(script, name, depth - 1) or number(script, default, depth - 1)


def _plain(word: str) -> int | None:
    """Return a decimal number; None if it has too many digits to count nodes or tasks."""
    return int(word) if word.isdecimal() and len(word) <= _MAX_DIGITS else None


def _product(script: Script, factors: list[str], depth: int) -> int | None:
    if len(factors) > _MAX_FACTORS:
        return None
    parts = [number(script, _as_variable(factor), depth) for factor in factors]
    whole = math.prod(part for part in parts if part)
    return whole if all(parts) and whole < 10**_MAX_DIGITS else None


def _as_variable(part: str) -> str:
    word = part.strip(" ()")
    return word if word.isdecimal() or word.startswith("$") else f"${word}"


def _of_slurm(script: Script, name: str, depth: int) -> int | None:
    if name in {"SLURM_NNODES", "SLURM_JOB_NUM_NODES"}:
        return nodes_of(script, depth=depth)
    if name in {"SLURM_NTASKS", "SLURM_NPROCS"}:
        return tasks_of(script, depth=depth)
    if name == "SLURM_NTASKS_PER_NODE":
        return tasks_per_node(script, depth=depth)
    if name in {"SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"}:
        return gpus_per_node(script) or None
    return None


def _count(text: str) -> int:
    """Return the number at the end of a GPU request.

    >>> _count("gpu:a100:4"), _count("2"), _count("gpu"), _count("")
    (4, 2, 1, 0)
    """
    if text == "gpu":
        return 1
    return _plain(text.rpartition(":")[2]) or 0
