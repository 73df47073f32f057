"""Which commands of a batch script start ranks, through what, and how many."""

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
_MOST_STEPS = 4  # from a word to the number it stands for: a variable may stand for itself
_MOST_FACTORS = 4
_MOST_DIGITS = 9


@dataclass(frozen=True)
class Launch:
    """A command that starts ranks, or an agent that does."""

    command: Command
    through: str
    """srun, mpirun, ssh; empty: the batch shell itself."""
    kind: str
    """agent (torchrun and its kin), python, paceline, or other: a program that is not known."""
    asked: dict[str, str] = field(default_factory=dict)
    """The options of srun."""
    options: dict[str, str] = field(default_factory=dict)
    """The options of the agent."""
    inner: Script | None = None
    """What `bash -c` runs in each task."""

    @property
    def line(self) -> int:
        """Where it stands."""
        return self.command.line

    @property
    def text(self) -> str:
        """All its words."""
        return " ".join(self.command.words)


def launches_of(script: Script) -> list[Launch]:
    """Return the commands that start ranks; of programs that are not known, only those that srun or mpirun starts."""
    found = [one for command in script.commands for one in _launch(command)]
    return [one for one in found if one.kind != "other" or one.through]


def _launch(command: Command) -> Iterator[Launch]:
    name = PurePath(command.words[0]).name
    through = _STARTERS.get(name, "")
    asked, rest = options_of(command.words[1:]) if through else ({}, list(command.words))
    kind, options, inner = _kind(rest, through)
    if kind:
        yield Launch(command, through, kind, asked, options, inner)


def _kind(words: list[str], through: str) -> tuple[str, dict[str, str], Script | None]:  # noqa: PLR0911 - one for each kind
    """Return what is started, with the options of an agent and the script of a shell; containers and wrappers are looked through."""
    for place, word in enumerate(words):
        name = PurePath(word).name
        if _AGENT.search(word) or word in _AGENT_MODULES:
            return _agent(words[place + 1 :])
        if name == "accelerate" and words[place + 1 : place + 2] == ["launch"]:
            return _agent(words[place + 2 :])
        if name == "paceline" or word.startswith("paceline."):
            return "paceline", {}, None
        if name in _SHELLS and "-c" in words[place + 1 : place + 3]:
            return _of_shell(words[words.index("-c", place) + 1 :])
        if _PYTHON.search(name):
            module = words[words.index("-m", place) + 1] if "-m" in words[place:-1] else ""
            if module in _AGENT_MODULES or module.startswith("paceline."):
                continue
            return "python", {}, None
        if not through:  # in the batch shell only what comes first is run
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


def nodes_of(script: Script, launch: Launch | None = None, depth: int = _MOST_STEPS) -> int:
    """Return on how many nodes a launch, or the job, runs; 1 if nothing is said."""
    asked = launch.asked.get("nodes", "") if launch else ""
    return (
        number(script, asked, depth)
        or number(script, script.value("nodes").partition("-")[0], depth)
        or 1
    )


def tasks_per_node(script: Script, launch: Launch | None = None, depth: int = _MOST_STEPS) -> int:
    """Return how many tasks srun starts on a node: as its own options say, else as those of the job."""
    nodes = nodes_of(script, launch, depth)
    for options in (
        launch.asked if launch else {},
        {name: value for name, (value, _) in script.options.items()},
    ):
        if each := number(script, options.get("ntasks-per-node", ""), depth):
            return each
        if whole := number(script, options.get("ntasks", ""), depth):
            return math.ceil(whole / nodes)
    gpus, per_task = (
        script.value("gpus-per-node") or script.value("gres"),
        script.value("gpus-per-task"),
    )
    return (_count(gpus) // max(1, _count(per_task)) or 1) if gpus and per_task else 1


def tasks_of(script: Script, launch: Launch | None = None, depth: int = _MOST_STEPS) -> int:
    """Return how many tasks srun starts in all."""
    whole = number(
        script, (launch.asked if launch else {}).get("ntasks", "") or script.value("ntasks"), depth
    )
    return whole or nodes_of(script, launch, depth) * tasks_per_node(script, launch, depth)


def number(script: Script, text: str, depth: int = _MOST_STEPS) -> int | None:
    r"""Return the number that a word stands for, as far as the script and its options say it.

    >>> script = read_script("#SBATCH -N 2 --ntasks-per-node=4\nG=4")
    >>> [number(script, text) for text in ("8", "$SLURM_NNODES", "${X:-3}", "$((SLURM_NNODES * $G))", "$(hostname)")]
    [8, 2, 3, 8, None]
    """
    word = text.strip().strip('"')
    if word.isdecimal():
        return _plain(word)
    if depth and (product := re.fullmatch(r"\$\(\((.*)\)\)", word)):
        return _product(script, product[1].split("*"), depth - 1)
    found = re.fullmatch(r"\$\{?(\w+)(?::-([^}]*))?\}?", word)
    if not found or not depth:
        return None
    if own := script.last(found[1]):
        return number(script, own.value, depth - 1)
    return _of_slurm(script, found[1], depth - 1) or number(script, found[2] or "", depth - 1)


def _plain(word: str) -> int | None:
    """Return a number as it is written; none of this many digits counts nodes or tasks."""
    return int(word) if word.isdecimal() and len(word) <= _MOST_DIGITS else None


def _product(script: Script, factors: list[str], depth: int) -> int | None:
    if len(factors) > _MOST_FACTORS:
        return None
    parts = [number(script, _named(factor), depth) for factor in factors]
    whole = math.prod(part for part in parts if part)
    return whole if all(parts) and whole < 10**_MOST_DIGITS else None


def _named(part: str) -> str:
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
        return _count(script.value("gpus-per-node") or script.value("gres")) or None
    return None


def _count(text: str) -> int:
    """Return the number at the end of a request for GPUs.

    >>> _count("gpu:a100:4"), _count("2"), _count("")
    (4, 2, 0)
    """
    return _plain(text.rpartition(":")[2]) or 0
