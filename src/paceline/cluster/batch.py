"""The text of a batch script: every value is quoted, or refused if it cannot be."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline import handover
from paceline.cluster.container import srun_options, wrap
from paceline.cluster.profile import ClusterProfile, check_sbatch_word
from paceline.config.checks import has_login, refuse_secret
from paceline.config.parse import seed_in_words
from paceline.errors import ConfigError

_TAIL = Path(__file__).with_name("job.sh")
_TIME = re.compile(r"\d+(-\d+(:\d\d){0,2})?|\d+:\d\d(:\d\d)?")

# The variables that a rank inside a container needs; docker passes on only those it is given.
_RANK_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_JOB_END_TIME", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", handover.SETTINGS, handover.PROGRESS, handover.STOP_MARK,
    handover.INCARNATION, handover.DEADLINE, handover.HOST_SUFFIX, handover.INTERFACE, handover.DATA, handover.SEED, handover.HASH_SEED,
    handover.SCRIPT,
)  # fmt: skip


@dataclass(frozen=True)
class BatchJob:
    """A command for Slurm, and the resources it needs."""

    words: tuple[str, ...]
    """What to run: path SCRIPT, module NAME or python INTERPRETER SCRIPT, then the script's arguments."""
    run: Path
    """The folder of the run."""
    folder: Path
    """The working directory of the ranks."""
    python: str
    """The Python interpreter of the ranks, unless the profile names an environment."""
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time: str
    user: str = "0:0"
    """UID:GID for docker."""
    foreign: bool = False
    """Whether the script does not use Paceline, so that its checkpoints are unknown."""
    script: str = ""
    """The value of `handover.SCRIPT`: which script the copy is."""

    def __post_init__(self) -> None:
        """Raise an error for a value that Slurm rejects or a shell would misread."""
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time!r} is not a time limit",
                fix="use HH:MM:SS, D-HH or minutes: --time 02:00:00",
            )
        for name, number in (("nodes", self.nodes), ("ranks-per-node", self.ranks_per_node)):
            if number < 1:
                raise ConfigError(
                    f"--{name} must be at least 1, got {number}", fix=f"use --{name} 1 or more"
                )
        if self.gpus_per_node < 0:
            raise ConfigError(
                f"--gpus-per-node must be at least 0, got {self.gpus_per_node}",
                fix="use --gpus-per-node 0 for a job without GPUs",
            )
        for word in (*self.words, self.python, str(self.run), str(self.folder)):
            check_word(word)
        for flag, value in pairwise(self.words):
            if flag.startswith("--") and "=" not in flag:
                refuse_secret(flag.removeprefix("--"), value)
        for path in (self.run, self.folder):
            if "\\" in str(path) or any(ord(char) < 32 for char in str(path)):
                raise ConfigError(
                    f"the path {str(path)!r} contains a backslash or a control character, "
                    "which Slurm does not accept",
                    fix="rename the folder, or use another one with runs= and name=",
                )


def limit_seconds(time: str) -> float:
    """Return a time limit in seconds; Slurm reads a bare number as minutes.

    >>> [limit_seconds(text) for text in ("1", "02:00:00", "30:00", "1-12", "1-12:30")]
    [60.0, 7200.0, 1800.0, 129600.0, 131400.0]
    """
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:  # minutes, or minutes and seconds
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def check_word(word: str) -> None:
    """Raise an error for an argument that has credentials in it or cannot be quoted."""
    if has_login(word):
        raise ConfigError(
            "an address in the script's arguments contains a user name or a password, "
            "and the batch script is a file",
            fix="remove it, and export the credentials of the storage in the shell where you submit",
        )
    name, equals, value = word.removeprefix("--").partition("=")
    if equals:
        refuse_secret(name, value)
    if "\0" in word:
        raise ConfigError(
            f"the argument {word[:50]!r} contains a zero byte", fix="remove the zero byte"
        )
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the argument {word[:50]!r} is not valid UTF-8", fix="rename it in UTF-8"
        ) from error


def batch_script(job: BatchJob, profile: ClusterProfile) -> str:
    """Return the complete script. Free text is never in an #SBATCH line: sbatch gets it as arguments."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in sbatch_options(job, profile)), ""]
    lines += [f"run={shlex.quote(str(job.run))}", f"requeue={'yes' if profile.requeue else ''}"]
    lines.append(f"foreign={'yes' if job.foreign else ''}")
    lines += [*_environment(job, profile), *_surroundings(profile), *_command(job, profile)]
    return "\n".join(lines) + "\n" + _TAIL.read_text(encoding="utf-8")


def sbatch_options(job: BatchJob, profile: ClusterProfile) -> list[str]:
    """Return the options for the #SBATCH lines, checked to need no quoting."""
    agents = profile.launcher == "torchrun"
    tasks = 1 if agents else job.ranks_per_node
    cpus = profile.cpus_per_rank * (job.ranks_per_node if agents else 1)
    lead_s = max(10, min(profile.lead_s, int(limit_seconds(job.time) / 2)))
    named = {
        "account": profile.charged,
        "partition": profile.partition,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(cpus) if cpus else "",
        **_gpus(job, profile),
        "time": job.time,
        "signal": f"B:USR1@{lead_s}",
        "open-mode": "append",
    }
    options = [f"--{name}={value}" for name, value in named.items() if value]
    options += ["--requeue" if profile.requeue else "--no-requeue", *profile.options]
    for option in options:
        check_sbatch_word("option", option)
    return options


def _gpus(job: BatchJob, profile: ClusterProfile) -> dict[str, str]:
    """Return the GPU request, per node: the ranks of a node must see each other's GPUs for NVLink."""
    if not job.gpus_per_node:
        return {}
    request = str(job.gpus_per_node)
    if profile.gpu_type:
        request = f"{profile.gpu_type}:{request}"
    if profile.gpu_request == "gres":
        return {"gres": f"gpu:{request}"}
    return {"gpus-per-node": request}


def _environment(job: BatchJob, profile: ClusterProfile) -> list[str]:
    settings = {"name": job.run.name, "runs": str(job.run.parent)}
    variables = {handover.SETTINGS: json.dumps(settings, ensure_ascii=False)}
    if job.script:
        variables[handover.SCRIPT] = job.script
    if profile.host_suffix:
        variables[handover.HOST_SUFFIX] = profile.host_suffix
    if profile.interface:
        variables[handover.INTERFACE] = profile.interface
    seed = seed_in_words(job.words)
    if not job.foreign:
        variables[handover.SEED] = str(seed)
    variables |= dict(profile.environment)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if not job.foreign:  # as LaunchSpec.variables
        lines.append('export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-FATAL}"')
    if handover.HASH_SEED not in variables:  # else a set has another order on every rank
        lines.insert(0, f'export {handover.HASH_SEED}="${{{handover.HASH_SEED}:-{seed % 2**32}}}"')
    return lines


def _surroundings(profile: ClusterProfile) -> list[str]:
    """Return a shell function that loads modules and the Python environment.

    A function, because the script must install its signal handlers before it runs.
    """
    lines = []
    if profile.modules:
        lines.append(f"module load {' '.join(map(_quote, profile.modules))}")
    if profile.venv:
        activate = Path(profile.venv).expanduser() / "bin" / "activate"
        lines.append(f"source {_quote(str(activate))}")
    if profile.conda:
        hook = 'eval "$(conda shell.bash hook)"'
        lines.append(f"{hook} && conda activate {_quote(profile.conda)}")
    body = [f"  {line}" for line in lines or [":"]]
    return ["surroundings() {", *body, "}"]


def _quote(word: str) -> str:
    check_word(word)
    return shlex.quote(word)


def _command(job: BatchJob, profile: ClusterProfile) -> list[str]:
    """Return the command of the step, and of the failure report after it, as shell arrays."""
    container = profile.container
    folders = [str(job.folder), str(job.run.parent)]
    folders.append("/tmp")  # noqa: S108 - for the rendezvous of the ranks of a node
    contained = container.kind != "none"
    workdir = str(job.folder) if contained else ""
    python = "python" if profile.venv or profile.conda or contained else job.python
    srun = [*_srun(job, profile), *srun_options(container, folders=folders, workdir=workdir)]
    rank = wrap(
        container,
        [python, "-u", "-m", *_rank_module(job, profile), *job.words],
        gpus=job.gpus_per_node > 0,
        environment=[*_RANK_VARIABLES, *dict(profile.environment)],
        folders=folders,
        workdir=workdir,
        user=job.user,
    )
    # Outside the container there may be no Python with Paceline: no failure report is written then.
    page = [] if contained else [python, "-m", "paceline", "hang", str(job.run)]
    return [
        "command=(",
        f"  {shlex.join(srun)}",
        f"  {shlex.join(rank)}",
        ")",
        f"page=({shlex.join(page)})",
    ]


def _srun(job: BatchJob, profile: ClusterProfile) -> list[str]:
    tasks_per_node = 1 if profile.launcher == "torchrun" else job.ranks_per_node
    return [
        "srun",
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes * tasks_per_node}",
        "--kill-on-bad-exit=1",
        "--export=ALL",
    ]


def _rank_module(job: BatchJob, profile: ClusterProfile) -> list[str]:
    if profile.launcher == "torchrun":
        return ["paceline.launch.agent_main", str(job.ranks_per_node)]
    return ["paceline.launch.rank_srun"]
