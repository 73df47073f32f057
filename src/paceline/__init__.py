"""Paceline: write the training once; run it on one core, eight GPUs or a Slurm cluster, with the same bits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paceline.version import VERSION

if sys.platform == "win32":
    from paceline.errors import EnvironmentUnfit

    raise EnvironmentUnfit(
        "Paceline does not run on Windows: it needs fork, flock and POSIX signals",
        fix="run it under WSL 2 (`wsl --install`), where it is a Linux program",
    )

if TYPE_CHECKING:
    from paceline.config import RunConfig as RunConfig
    from paceline.config import config_from_argv as config_from_argv
    from paceline.data.pack import pack_samples as pack_samples
    from paceline.data.reading.open_dataset import open_dataset as open_dataset
    from paceline.data.reading.sampled import by_length as by_length
    from paceline.data.reading.sampled import mixture as mixture
    from paceline.data.reading.sampled import weighted as weighted
    from paceline.data.reading.stream import Stream as Stream
    from paceline.data.reading.transform import transformed as transformed
    from paceline.errors import PacelineError as PacelineError
    from paceline.kernels.attention import causal_attention as causal_attention
    from paceline.notebook.extension import load_ipython_extension as load_ipython_extension
    from paceline.scale.lr import scaled_lr as scaled_lr
    from paceline.train.callbacks import Callback as Callback
    from paceline.train.run import Run as Run
    from paceline.train.trainer import Trainer as Trainer
    from paceline.train.trainer import accuracy as accuracy


__version__ = VERSION

# Looked up on first use: whatever runs outside the ranks must import without torch.
_HOMES = {
    "Callback": "paceline.train.callbacks",
    "PacelineError": "paceline.errors",
    "Run": "paceline.train.run",
    "RunConfig": "paceline.config",
    "Stream": "paceline.data.reading.stream",
    "Trainer": "paceline.train.trainer",
    "accuracy": "paceline.train.trainer",
    "by_length": "paceline.data.reading.sampled",
    "causal_attention": "paceline.kernels.attention",
    "config_from_argv": "paceline.config",
    "load_ipython_extension": "paceline.notebook.extension",
    "mixture": "paceline.data.reading.sampled",
    "open_dataset": "paceline.data.reading.open_dataset",
    "pack_samples": "paceline.data.pack",
    "scaled_lr": "paceline.scale.lr",
    "transformed": "paceline.data.reading.transform",
    "weighted": "paceline.data.reading.sampled",
}

# IPython alone calls load_ipython_extension.
__all__ = sorted(_HOMES.keys() - {"load_ipython_extension"})  # noqa: PLE0605 - the table is the one list of names


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
