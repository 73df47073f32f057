"""Import packages that only some inputs need, or say what to install."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import EnvironmentUnfit

_INSTALLED_AS = {"PIL": "pillow"}


def import_optional(module: str, purpose: str) -> Any:
    """Import a module of an optional package; raise with the install command if it is missing."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentUnfit(
            f"{purpose} needs the package {package}, which cannot be imported ({error})",
            fix=f"pip install {_INSTALLED_AS.get(package, package)}",
        ) from error
