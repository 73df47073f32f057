"""Which packages only some inputs need, and what to install where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import EnvironmentUnfit

_EXTRAS = {"h5py": "hdf5", "PIL": "images", "tokenizers": "text", "pyarrow": "tables"}


def need(module: str, purpose: str) -> Any:
    """Import a module of an optional package, or say how to get it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentUnfit(
            f"{purpose} needs the package {package}, which cannot be imported ({error})",
            fix=f"pip install 'paceline[{_EXTRAS[package]}]'",
        ) from error
