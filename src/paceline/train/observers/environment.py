"""The environment of a run for environment.json: command, commit, versions, machine, relevant variables."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from paceline import handover
from paceline.redact import command_line, without_secrets
from paceline.units import human_size
from paceline.version import VERSION
from paceline.world.machine import cpu_name, memory_bytes

_RELEVANT = (
    "CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PACELINE_DATA", "PACELINE_INTERFACE", "PYTORCH_", "SLURM_CPUS_",
    "SLURM_GPUS_", "SLURM_JOB_", "SLURM_NNODES", "SLURM_NTASKS", "TORCH_",
)  # fmt: skip

_GIT_LIMIT_S = 3.0  # all ranks wait for this one; the run does not depend on the answer
# Reading changes nothing in the repository, and starts no program that its settings name.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def environment_facts(device: str) -> str:
    """Return versions, machine and variables as JSON, without secrets."""
    facts = {
        "command": command_of(os.environ, sys.argv),
        "git": git_state(Path(sys.argv[0])),
        "versions": _versions(),
        "machine": _machine(device),
        "variables": relevant_variables(os.environ),
    }
    return json.dumps(without_secrets(facts), indent=2) + "\n"


def command_of(env: Mapping[str, str], argv: Sequence[str]) -> str:
    """Return what the user typed, as the launcher reports it, else the script and its arguments; without secrets.

    >>> command_of({}, ["train.py", "epochs=3", "hub_token=abc"])
    'python train.py epochs=3 hub_token=[removed]'
    """
    return env.get(handover.COMMAND) or command_line(["python", *argv])


def relevant_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect a training.

    >>> relevant_variables({"NCCL_DEBUG": "INFO", "HOME": "/home/me", "OMP_NUM_THREADS": "1"})
    {'NCCL_DEBUG': 'INFO', 'OMP_NUM_THREADS': '1'}
    """
    return {name: env[name] for name in sorted(env) if name.startswith(_RELEVANT)}


def git_state(script: Path) -> dict[str, object]:
    """Return the commit of the repository that a script is in, and whether the tree was clean; empty: unknown.

    A tree is clean if no tracked file differs from the commit, and the script is one of them.
    """
    folder = str(script.absolute().parent)
    lines = _ask_git("-C", folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    known = ("ls-files", "-t", "--cached", "--others", "--exclude-standard", "--", script.name)
    script_state = _ask_git("-C", folder, *known) if heads and heads != ["(initial)"] else []
    if not script_state:  # no repository, or it ignores the folder of the script
        return {}
    is_tracked = script_state[0].startswith("H ")
    changed = any(not line.startswith("#") for line in lines)
    return {"commit": heads[0], "clean": is_tracked and not changed}


def _ask_git(*words: str) -> list[str]:
    """Return the lines that git prints; none if there is no git, no repository, or no answer."""
    try:
        done = subprocess.run(
            [*_GIT, *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_LIMIT_S,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _versions() -> dict[str, str]:
    versions = {
        "paceline": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _machine(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory": human_size(memory_bytes()),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["gpus"] = torch.cuda.device_count()
    return facts
