"""The environment of a run for environment.json: command, commit, versions, machine, relevant variables."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from paceline import handover
from paceline.redact import command_line, without_secrets
from paceline.train.observers.git_state import git_state
from paceline.units import human_size
from paceline.version import VERSION
from paceline.world.machine import cpu_name, memory_bytes

_RELEVANT = (
    "CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PACELINE_DATA", "PACELINE_INTERFACE", "PYTORCH_", "SLURM_CPUS_",
    "SLURM_GPUS_", "SLURM_JOB_", "SLURM_NNODES", "SLURM_NTASKS", "TORCH_",
)  # fmt: skip


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
