"""Write the batch script of a training, show it, give it to Slurm; the job saves before its time limit and goes on by itself.

Words after the script that are not options of submit are the script's own, and so is everything after --.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paceline.cli.verify import target
from paceline.cluster import slurm
from paceline.cluster.profile import ClusterProfile, load_profile, profile_folder
from paceline.cluster.registry import Submission
from paceline.cluster.submission import PreparedJob, SubmitRequest, prepare, submit

HELP = "write, show and submit a Slurm job: the right ranks on the right GPUs, requeued before the time limit"

_FROM_PROFILE = ("account", "partition", "qos", "constraint", "launcher")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "script", help="a script, or the name of a recipe; words after it are its own"
    )
    parser.add_argument(
        "--cluster",
        default="",
        metavar="NAME",
        help="cluster profile (`paceline cluster list`); default: $PACELINE_CLUSTER, else generic",
    )
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes")
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        help="GPUs of each node, one rank for each; default: the profile's",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=0, help="ranks of each node, where there are no GPUs"
    )
    parser.add_argument(
        "--time",
        default="01:00:00",
        help="time limit of a job: HH:MM:SS; a longer training is requeued",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="a chain of N jobs, for sites that forbid requeueing",
    )
    parser.add_argument(
        "--launcher",
        choices=["srun", "torchrun"],
        help="one task per rank by srun, or one elastic agent per node",
    )
    for name in _FROM_PROFILE[:4]:
        parser.add_argument(f"--{name}", help=f"{name}, instead of the profile's")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--print",
        action="store_true",
        dest="only_print",
        help="show the batch script, and do nothing",
    )
    shown.add_argument("--json", action="store_true", help="print what was submitted as JSON")


def main(known: argparse.Namespace) -> int:
    """Submit, and say what was done."""
    prepared = prepare(_request(known), Path.cwd())
    if not known.only_print:
        slurm.require("sbatch")
    if not known.json:
        print(prepared.script, end="")
    if known.only_print:
        return 0
    found = submit(prepared)
    print(
        json.dumps({"jobs": [asdict(one) for one in found]}, indent=2)
        if known.json
        else _told(prepared, found)
    )
    return 0


def _request(known: argparse.Namespace) -> SubmitRequest:
    profile = load_profile(
        known.cluster or os.environ.get("PACELINE_CLUSTER") or "generic", profile_folder(os.environ)
    )
    given = {
        name: getattr(known, name) for name in _FROM_PROFILE if getattr(known, name) is not None
    }
    profile = replace(profile, **given, requeue=profile.requeue and known.jobs == 1)
    return SubmitRequest(
        target=target(known.script),
        arguments=tuple(known.arguments),
        profile=profile,
        nodes=known.nodes,
        gpus_per_node=_gpus(known, profile),
        ranks_per_node=known.ranks_per_node,
        time=known.time,
        jobs=known.jobs,
    )


def _gpus(known: argparse.Namespace, profile: ClusterProfile) -> int:
    return profile.gpus_per_node if known.gpus_per_node is None else int(known.gpus_per_node)


def _told(prepared: PreparedJob, found: Sequence[Submission]) -> str:
    job = prepared.job
    ranks = f"{job.nodes} x {job.ranks_per_node} ranks, {job.time} each"
    numbers = " -> ".join(one.job for one in found)
    first = found[0]
    return "\n".join(
        [
            "",
            f"submitted job {numbers} ({ranks}) as run {prepared.run.root.name}",
            f"  log     {first.log}",
            f"  watch   paceline watch {first.job}",
            f"  cancel  paceline cancel {first.job}",
        ]
    )
