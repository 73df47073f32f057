"""The commands of a batch script that start ranks: by which launcher, and how many."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from paceline.doctor.batch_parser import (
    MARKED,
    Command,
    Script,
    is_unknown,
    options_of,
    read_script,
)

_STARTERS = {
    "srun": "srun",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
    "ssh": "ssh",
    "pdsh": "ssh",
    "clush": "ssh",
}
_SHELLS = {"bash", "sh", "zsh", "dash"}
_WRAPPERS = {
    "uv", "poetry", "pipenv", "pixi", "conda", "mamba", "micromamba", "singularity", "apptainer", "shifter", "docker", "podman", "podman-hpc",
    "env", "numactl", "nice", "stdbuf", "taskset", "timeout", "nsys", "ncu", "kernprof", "coverage", "xvfb-run", "sudo", "unbuffer",
}  # fmt: skip
"""Programs that run the program in their arguments."""
_RUNNERS = {"uv", "run", "kernprof", "coverage", "poetry", "pixi", "pipenv"}
"""Of these, those that run a Python script without naming python."""
_HELPERS = {
    "hostname", "echo", "printf", "nvidia-smi", "rocm-smi", "mkdir", "cp", "rsync", "rm", "mv", "sleep", "date", "ls", "cat", "tar", "unzip",
    "unsquashfs", "ln", "pip", "printenv", "true", "touch", "sbcast", "sgather", "nproc", "lscpu", "numactl", "chmod", "df", "free", "ip", "pwd",
}  # fmt: skip
"""Programs that are no training, whoever starts them."""
_PYTHON = re.compile(r"python[\d.]*$|:-python[\d.]*\}$")
_AGENT = re.compile(r"(^|/|:-)torchrun\}?$")
_AGENT_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
_PREPARING = re.compile(
    r"(^|[\W_])(prepa?r|prepro|process|download|convert|tokeni[sz]|eval|test|infer|generat|predict|analy|plot|setup|check(?!point)|install|"
    r"merge|split|load_|get_|compar|aggregat|gather|bench|creat|build|sync|viz|visuali[sz]|valid|consolidat|extract|upload|serve|render)"
)
"""Names of programs that are no training."""
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_FULL_GPUS, _FULL_CORES = 8, 128  # as many as most nodes have: who asks for them shares with nobody
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
    """agent (torchrun, accelerate), deepspeed, python, paceline, or other: an unknown program."""
    asked: dict[str, str] = field(default_factory=dict)
    """The options of srun."""
    options: dict[str, str] = field(default_factory=dict)
    """The options of the agent."""
    inner: Script | None = None
    """The script that `bash -c` runs in each task."""
    program: str = ""
    """The script or module that is run, as far as it is known."""
    wrapper: str = ""
    """An unknown program that starts the launcher, such as a script of the user's own."""

    @property
    def line(self) -> int:
        """Its line in the batch script."""
        return self.command.line

    @property
    def text(self) -> str:
        """The whole command."""
        return " ".join(self.command.words)

    @property
    def is_complete(self) -> bool:
        """Whether all its options are known: none is in a variable from elsewhere, or in a file."""
        options = [*self.asked, *self.options]
        return not any(name.startswith("$") or name == "config-file" for name in options)

    @property
    def trains(self) -> bool:
        """Whether it starts a training, as far as the name of its program tells."""
        return self.kind != "other" and not _PREPARING.search(self.program.lower())


def launches_of(script: Script) -> list[Launch]:
    """Return the commands that start ranks; unknown programs only if srun or mpirun starts them."""
    launches: list[Launch] = []
    called = {command.words[0] for command in script.commands}
    for command in script.commands:
        if not command.function or command.function in called:
            launches += _launch(script, command)
    return [launch for launch in launches if launch.kind != "other" or launch.through]


def _launch(script: Script, command: Command) -> Iterator[Launch]:
    name = PurePath(command.words[0]).name
    through = _STARTERS.get(name, "")
    asked, rest = options_of(command.words[1:]) if through else ({}, list(command.words))
    found = _program(rest, through)
    if found and found.inner and _starts_unknown(found.inner):
        # In single quotes: each task expands what the batch shell exports.
        found = _of_shell(script.expand(found.inner.text))
    if found:
        own = PurePath(rest[0]).name if rest else ""
        known = (
            own in _WRAPPERS | _SHELLS | {"accelerate"} or _AGENT.search(own) or _PYTHON.search(own)
        )
        wrapper = "" if known or found.kind != "agent" else own
        yield replace(found, command=command, through=through, asked=asked, wrapper=wrapper)


_NOTHING = Command(0, ("",))


def _program(words: list[str], through: str) -> Launch | None:  # noqa: PLR0911, PLR0912, C901 - one return per kind
    """Return what the words start, also inside containers and wrappers; None if it is no training."""
    wrapped = bool(through)
    if (
        words
        and PurePath(words[0]).name in {"docker", "podman"}
        and words[1:2] not in (["run"], ["exec"])
    ):
        return None
    for index, word in enumerate(words):
        name = PurePath(word).name
        if index == 0 and (name in _HELPERS and name not in _WRAPPERS):
            return None
        if name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
            return _accelerate(words[index + 2 :])
        if word == "accelerate.commands.launch":
            return _accelerate(words[index + 1 :])
        if _AGENT.search(word) or word in _AGENT_MODULES:
            return _agent(words[index + 1 :])
        if name == "deepspeed":
            options, rest = options_of(words[index + 1 :])
            return Launch(_NOTHING, "", "deepspeed", {}, options, None, _first(rest))
        if name == "paceline" or word.startswith("paceline."):
            return Launch(_NOTHING, "", "paceline")
        if name in _SHELLS and (script := _shell_script(words[index + 1 :])) is not None:
            return _of_shell(script)
        if _PYTHON.search(name):
            if not _is_agent_module(words[index + 1 :]):
                return _of_python(words[index + 1 :])
            wrapped = True
        if word.endswith(".py") and PurePath(words[0]).name in _RUNNERS:
            return Launch(_NOTHING, "", "python", program=name)
        if _ASSIGNED.match(word) and not through:
            continue
        wrapped = wrapped or name in _WRAPPERS
        if not wrapped:  # the batch shell runs only the first word
            return None
    return Launch(_NOTHING, "", "other") if words and through == "srun" else None


def _is_agent_module(words: list[str]) -> bool:
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return module in _AGENT_MODULES or module.startswith("paceline.")


def _of_python(words: list[str]) -> Launch | None:
    """Return the launch of a Python program; None for the modules of everyday work."""
    while words and words[0].startswith("-") and words[0] not in {"-m", "-c"}:
        words = words[2:] if words[0] in {"-W", "-X"} else words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        if words[1] in {"pip", "venv", "compileall", "site", "build", "json.tool", "http.server"}:
            return None
        return Launch(_NOTHING, "", "python", program=words[1])
    if words[:1] == ["-c"]:
        return None
    return Launch(_NOTHING, "", "python", program=PurePath(_first(words)).name)


def _first(words: list[str]) -> str:
    return words[0] if words else ""


def _agent(words: list[str]) -> Launch:
    options, rest = options_of(words)
    return Launch(_NOTHING, "", "agent", {}, options, None, PurePath(_first(rest)).name)


def _accelerate(words: list[str]) -> Launch:
    options, rest = options_of(words)
    known = {
        "main-process-ip": "master-addr",
        "main-process-port": "master-port",
        "num-machines": "nnodes",
        "machine-rank": "node-rank",
    }
    renamed = {known.get(name, name): value for name, value in options.items()}
    # What is not given stands in the user's own file of defaults, which is not known here.
    renamed.setdefault("config-file", "")
    return Launch(_NOTHING, "", "agent", {}, renamed, None, PurePath(_first(rest)).name)


def _shell_script(words: list[str]) -> str | None:
    """Return the script of `bash -c SCRIPT`, also as `sh -xec SCRIPT`; None if there is none."""
    for index, word in enumerate(words):
        if not word.startswith("-"):
            return None
        if re.fullmatch(r"-\w*c", word):
            return words[index + 1] if index + 1 < len(words) else None
    return None


def _of_shell(text: str) -> Launch:
    inner = read_script(text.replace(MARKED, ""))
    for command in inner.commands:
        found = _program(list(command.words), "")
        if found:
            return replace(found, inner=inner)
    # Tasks that get a rank are ranks, whatever the variable starts that holds their program.
    kind = "python" if _starts_unknown(inner) and re.search(r"\bRANK=", text) else "other"
    return Launch(_NOTHING, "", kind, inner=inner)


def _starts_unknown(script: Script) -> bool:
    return any(is_unknown(command.words[0]) for command in script.commands)


def is_whole_node(script: Script, launches: Sequence[Launch] = ()) -> bool:
    """Return whether the job shares its nodes with no other, as far as its options and ranks tell.

    >>> is_whole_node(read_script("#SBATCH --gres=gpu:8")), is_whole_node(read_script("#SBATCH -N 2"))
    (True, False)
    """
    shares = "exclusive" not in script.options or script.value("exclusive") in {"user", "mcs"}
    ranks = [number(script, launch.options.get("nproc-per-node", "")) or 0 for launch in launches]
    ranks += [
        tasks_per_node(script, one) for one in launches if one.kind == "python" and one.through
    ]
    most = max([gpus_per_node(script), *ranks])
    cores = (number(script, script.value("cpus-per-task")) or 1) * tasks_per_node(script)
    full = most >= _FULL_GPUS or cores >= _FULL_CORES
    return not shares or script.value("mem") == "0" or full


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
    asked = launch.asked if launch else {}
    if whole := number(script, asked.get("ntasks", ""), depth):
        return math.ceil(whole / nodes)
    of_job = {name: value for name, (value, _) in script.options.items()}
    each = number(script, of_job.get("ntasks-per-node", ""), depth)
    whole = number(script, of_job.get("ntasks", ""), depth)
    planned = each or (math.ceil(whole / nodes) if whole else 0)
    if own := number(script, asked.get("ntasks-per-node", ""), depth):
        # srun inherits the number of tasks, and its own --ntasks-per-node is then only a limit,
        # which it ignores with a warning where it cannot be kept.
        return max(own, planned)
    if planned:
        return planned
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
    asked = launch.asked if launch else {}
    whole = number(script, asked.get("ntasks", ""), depth)
    if not whole and not {"nodes", "ntasks-per-node"} & asked.keys():
        whole = number(script, script.value("ntasks"), depth)
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
        return number(script, variable.value or "", depth - 1)
    if script.is_set(name):
        return None
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
        return nodes_of(script, depth=depth) if "nodes" in script.options else None
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
