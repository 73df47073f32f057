"""The environment of a run for environment.json: versions, machine, relevant variables."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from paceline.redact import without_secrets
from paceline.version import VERSION

_RELEVANT = (
    "CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PACELINE_DATA", "PACELINE_INTERFACE", "PYTORCH_", "SLURM_CPUS_",
    "SLURM_GPUS_", "SLURM_JOB_", "SLURM_NNODES", "SLURM_NTASKS", "TORCH_",
)  # fmt: skip


def environment_facts(device: str) -> str:
    """Return versions, machine and variables as JSON, without secrets."""
    variables = relevant_variables(os.environ)
    facts = {"versions": _versions(), "machine": _machine(device), "variables": variables}
    return json.dumps(without_secrets(facts), indent=2) + "\n"


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
        "cores": os.cpu_count(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["gpus"] = torch.cuda.device_count()
    return facts
