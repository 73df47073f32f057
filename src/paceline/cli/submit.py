"""`paceline submit`: write the batch script of a training, show it, and submit it to Slurm."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.cli.verify import program_from
from paceline.cluster import slurm
from paceline.cluster.profile import ClusterProfile, load_profile, profile_folder
from paceline.cluster.registry import Submission
from paceline.cluster.submission import PreparedJob, SubmitRequest, prepare, submit
from paceline.config.arguments import flag, option, positional, verbatim
from paceline.doctor.disk import IN_MEMORY, filesystem_of
from paceline.errors import ConfigError
from paceline.launch.spec import Program, script

_FROM_PROFILE = ("account", "partition", "qos", "constraint", "launcher")


@dataclass(frozen=True, kw_only=True)
class SubmitArguments:
    """The job saves before its time limit, is requeued, and resumes from the newest intact checkpoint."""

    script: str = positional(metavar="SCRIPT")
    """Script to run, or the name of a recipe."""
    script_arguments: tuple[str, ...] = verbatim("ARGUMENT")
    """Arguments of the script. Options of paceline come before SCRIPT; all words after it are passed on unchanged."""
    python: str = option("", metavar="PATH")
    """Python interpreter of the ranks, with its own packages; it needs no Paceline (default: this one, or that of the profile)."""
    cluster: str = option("", metavar="NAME")
    """Cluster profile (`paceline cluster list`); default: $PACELINE_CLUSTER, else generic."""
    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int | None = None
    """GPUs per node, with one rank each (default: from the profile)."""
    ranks_per_node: int = 0
    """Ranks per node on nodes without GPUs."""
    time: str = option("01:00:00", metavar="HH:MM:SS")
    """Time limit of a job; a longer training is requeued."""
    jobs: int = 1
    """Submit a chain of N jobs, for sites that forbid requeueing."""
    launcher: Literal["srun", "torchrun"] | None = None
    """srun starts one task per rank; torchrun starts one elastic agent per node (default: from the profile)."""
    account: str | None = option(None, metavar="NAME")
    """Slurm account (default: from the profile)."""
    partition: str | None = option(None, metavar="NAME")
    """Slurm partition (default: from the profile)."""
    qos: str | None = option(None, metavar="NAME")
    """Slurm QOS (default: from the profile)."""
    constraint: str | None = option(None, metavar="FEATURES")
    """Slurm constraint (default: from the profile)."""
    only_print: bool = flag("--print")
    """Print the batch script without submitting it."""
    json: bool = False
    """Print the submitted jobs as JSON."""


def main(arguments: SubmitArguments) -> int:
    """Submit the training; return the exit code."""
    if arguments.only_print and arguments.json:
        raise ConfigError("--print and --json exclude each other", fix="give one of them")
    prepared = prepare(_request(arguments), Path.cwd())
    if not arguments.only_print:
        slurm.require("sbatch")
    if not arguments.json:
        print(prepared.script, end="")
    if arguments.only_print:
        return 0
    jobs = submit(prepared)
    _warn_of_folder_in_memory(prepared.run.root)
    if arguments.json:
        print(json.dumps({"jobs": [asdict(job) for job in jobs]}, indent=2))
    else:
        print(_summary(prepared, jobs))
    return 0


def _warn_of_folder_in_memory(run: Path) -> None:
    kind = filesystem_of(run)
    if kind in IN_MEMORY:
        print(
            f"warning: {run} is in the memory of this machine ({kind}), which other nodes do not see; "
            "put the runs on a disk that all nodes share: runs=FOLDER",
            file=sys.stderr,
        )


def _request(arguments: SubmitArguments) -> SubmitRequest:
    name = arguments.cluster or os.environ.get("PACELINE_CLUSTER") or "generic"
    profile = load_profile(name, profile_folder(os.environ))
    overrides = {}
    for field in _FROM_PROFILE:
        value = getattr(arguments, field)
        if value is not None:
            overrides[field] = value
    profile = replace(profile, **overrides, requeue=profile.requeue and arguments.jobs == 1)
    return SubmitRequest(
        target=_target(arguments),
        arguments=arguments.script_arguments,
        profile=profile,
        nodes=arguments.nodes,
        gpus_per_node=_gpus(arguments, profile),
        ranks_per_node=arguments.ranks_per_node,
        time=arguments.time,
        jobs=arguments.jobs,
    )


def _target(arguments: SubmitArguments) -> Program:
    if arguments.python:
        return script(arguments.script, arguments.python)
    return program_from(arguments.script)


def _gpus(arguments: SubmitArguments, profile: ClusterProfile) -> int:
    if arguments.gpus_per_node is None:
        return profile.gpus_per_node
    return arguments.gpus_per_node


def _summary(prepared: PreparedJob, jobs: Sequence[Submission]) -> str:
    job = prepared.job
    ranks = f"{job.nodes} x {job.ranks_per_node} ranks, {job.time} each"
    ids = " -> ".join(submitted.job for submitted in jobs)
    first = jobs[0]
    lines = [
        "",
        f"submitted job {ids} ({ranks}) as run {prepared.run.root.name}",
        f"  log     {first.log}",
        f"  watch   paceline watch {first.job}",
        f"  cancel  paceline cancel {first.job}",
    ]
    return "\n".join(lines)
