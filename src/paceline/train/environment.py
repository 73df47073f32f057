"""What a run was started on, for whoever asks later: versions, machine, the variables that matter."""

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

_MATTER = (
    "CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PACELINE_DATA", "PACELINE_INTERFACE", "PYTORCH_", "SLURM_CPUS_",
    "SLURM_GPUS_", "SLURM_JOB_", "SLURM_NNODES", "SLURM_NTASKS", "TORCH_",
)  # fmt: skip


def environment_facts(device: str) -> str:
    """Return them as JSON, without secrets."""
    found = {"versions": _versions(), "machine": _machine(device), "variables": telling(os.environ)}
    return json.dumps(without_secrets(found), indent=2) + "\n"


def telling(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a training runs.

    >>> telling({"NCCL_DEBUG": "INFO", "HOME": "/home/me", "OMP_NUM_THREADS": "1"})
    {'NCCL_DEBUG': 'INFO', 'OMP_NUM_THREADS': '1'}
    """
    return {name: env[name] for name in sorted(env) if name.startswith(_MATTER)}


def _versions() -> dict[str, str]:
    found = {"paceline": VERSION, "python": platform.python_version(), "torch": torch.__version__}
    found |= {"numpy": numpy.__version__}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }
    if device.startswith("cuda"):
        found |= {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}
    return found
