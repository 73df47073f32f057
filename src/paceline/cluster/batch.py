"""What a batch script says: pure text, every word quoted or refused."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from paceline import handover
from paceline.cluster.container import srun_options, wrap
from paceline.cluster.profile import ClusterProfile, check_sbatch_word
from paceline.config.checks import has_login
from paceline.errors import ConfigError

_TAIL = Path(__file__).with_name("job.sh")
_TIME = re.compile(r"\d+(-\d+(:\d\d){0,2})?|\d+:\d\d(:\d\d)?")

# What a rank inside a container must know of the job; docker passes on only what it is told to.
_RANK_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_JOB_END_TIME", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", handover.SETTINGS, handover.PROGRESS, handover.STOP_MARK,
    handover.INCARNATION, handover.DEADLINE, handover.HOST_SUFFIX, handover.INTERFACE, handover.DATA,
)  # fmt: skip


@dataclass(frozen=True)
class BatchJob:
    """What is to run, on how much."""

    words: tuple[str, ...]
    """How Python is told to run it: path SCRIPT, or module NAME, and the script's own words."""
    run: Path
    """The folder of the run."""
    folder: Path
    """The folder in which the ranks start."""
    python: str
    """The Python of the ranks, unless the profile names an environment."""
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time: str
    user: str = "0:0"
    """User and group, as numbers, for docker."""

    def __post_init__(self) -> None:
        """Refuse what Slurm would not take, or a shell would take for something else."""
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time!r} is not a time limit",
                fix="give it as HH:MM:SS, D-HH or minutes",
            )
        for name, number in (("nodes", self.nodes), ("ranks-per-node", self.ranks_per_node)):
            if number < 1:
                raise ConfigError(
                    f"--{name} {number} is too small", fix=f"ask for at least one: --{name} 1"
                )
        if self.gpus_per_node < 0:
            raise ConfigError(
                f"--gpus-per-node {self.gpus_per_node} is negative",
                fix="give 0 for a job without GPUs",
            )
        for word in (*self.words, self.python, str(self.run), str(self.folder)):
            check_word(word)
        for path in (self.run, self.folder):
            if "\\" in str(path) or any(ord(letter) < 32 for letter in str(path)):
                raise ConfigError(
                    f"the path {str(path)!r} has a backslash or a control character, which Slurm cannot take",
                    fix="rename the folder, or give another with runs= and name=",
                )


def limit_seconds(time: str) -> float:
    """Return a time limit in seconds; Slurm takes a bare number for minutes.

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
    """Refuse a word that no command line can carry, or no file should."""
    if has_login(word):
        raise ConfigError(
            "an address among the script's words has a name or a password in it, and the batch script is a file",
            fix="leave it out, and export the storage's own variables in the shell from which you submit",
        )
    if "\0" in word:
        raise ConfigError(f"the word {word[:50]!r} holds a zero byte", fix="leave it out")
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the word {word[:50]!r} is not text", fix="leave out what is not UTF-8"
        ) from error


def batch_script(job: BatchJob, profile: ClusterProfile) -> str:
    """Return the whole script. What is free text never stands in an #SBATCH line: sbatch is told it as arguments."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in sbatch_options(job, profile)), ""]
    lines += [f"run={shlex.quote(str(job.run))}", f"requeue={'yes' if profile.requeue else ''}"]
    lines += [*_environment(job, profile), *_surroundings(profile), *_command(job, profile)]
    return "\n".join(lines) + "\n" + _TAIL.read_text(encoding="utf-8")


def sbatch_options(job: BatchJob, profile: ClusterProfile) -> list[str]:
    """Return the options that the script carries; each was checked to be a plain word."""
    agents = profile.launcher == "torchrun"
    tasks = 1 if agents else job.ranks_per_node
    cpus = profile.cpus_per_rank * (job.ranks_per_node if agents else 1)
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
        "signal": f"B:USR1@{max(10, min(profile.lead_s, int(limit_seconds(job.time) / 2)))}",
        "open-mode": "append",
    }
    options = [f"--{name}={value}" for name, value in named.items() if value]
    options += ["--requeue" if profile.requeue else "--no-requeue", *profile.options]
    for option in options:
        check_sbatch_word("option", option)
    return options


def _gpus(job: BatchJob, profile: ClusterProfile) -> dict[str, str]:
    """Return the request for GPUs: of whole nodes, so that ranks of a node see each other's GPUs and talk directly."""
    if not job.gpus_per_node:
        return {}
    typed = (
        f"{profile.gpu_type}:{job.gpus_per_node}" if profile.gpu_type else str(job.gpus_per_node)
    )
    return {"gres": f"gpu:{typed}"} if profile.gpu_request == "gres" else {"gpus-per-node": typed}


def _environment(job: BatchJob, profile: ClusterProfile) -> list[str]:
    settings = json.dumps({"name": job.run.name, "runs": str(job.run.parent)}, ensure_ascii=False)
    variables = {handover.SETTINGS: settings}
    if profile.host_suffix:
        variables[handover.HOST_SUFFIX] = profile.host_suffix
    if profile.interface:
        variables[handover.INTERFACE] = profile.interface
    return [
        f"export {name}={shlex.quote(value)}"
        for name, value in (variables | dict(profile.environment)).items()
    ]


def _surroundings(profile: ClusterProfile) -> list[str]:
    """Return the function that brings the modules and the Python environment; signals are heeded before it runs."""
    lines = (
        [f"module load {' '.join(shlex.quote(check(module)) for module in profile.modules)}"]
        if profile.modules
        else []
    )
    if profile.venv:
        lines.append(
            f"source {shlex.quote(str(Path(check(profile.venv)).expanduser() / 'bin' / 'activate'))}"
        )
    if profile.conda:
        lines.append(
            f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(check(profile.conda))}'
        )
    return ["surroundings() {", *(f"  {line}" for line in lines or [":"]), "}"]


def check(word: str) -> str:
    """Return a word that a command line can carry."""
    check_word(word)
    return word


def _command(job: BatchJob, profile: ClusterProfile) -> list[str]:
    """Return the command as an array of the shell, one word a line where it is long."""
    agents = profile.launcher == "torchrun"
    tasks = job.nodes if agents else job.nodes * job.ranks_per_node
    entry = (
        ["paceline.launch.agent_main", str(job.ranks_per_node)]
        if agents
        else ["paceline.launch.rank_srun"]
    )
    box, folder = profile.container, str(job.folder)
    folders = [folder, str(job.run.parent), "/tmp"]  # noqa: S108 - where the ranks of one node meet
    python = "python" if profile.venv or profile.conda or box.kind != "none" else job.python
    workdir = folder if box.kind != "none" else ""
    srun = [
        "srun",
        f"--nodes={job.nodes}",
        f"--ntasks={tasks}",
        "--kill-on-bad-exit=1",
        "--export=ALL",
    ]
    inside = wrap(
        box,
        [python, "-u", "-m", *entry, *job.words],
        gpus=job.gpus_per_node > 0,
        environment=[*_RANK_VARIABLES, *dict(profile.environment)],
        folders=folders,
        workdir=workdir,
        user=job.user,
    )
    words = [*srun, *srun_options(box, folders=folders, workdir=workdir)]
    # Outside a container there may be no Python of ours; the page is then left to whoever looks at the run next.
    page = [python, "-m", "paceline", "hang", str(job.run)] if box.kind == "none" else []
    return [
        "command=(",
        f"  {shlex.join(words)}",
        f"  {shlex.join(inside)}",
        ")",
        f"page=({shlex.join(page)})",
    ]
