"""Which settings a person has given: these come before the arguments of a script, and its arguments before defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from paceline.config.schema import RunConfig
from paceline.config.values import flatten

C = TypeVar("C", bound=RunConfig)
_GIVEN = "_given"


def remember_given(config: C, names: Iterable[str]) -> C:
    """Note the names of the settings on the command line, in files and in the environment; return the config."""
    object.__setattr__(config, _GIVEN, frozenset(names))
    return config


def is_given(config: RunConfig, name: str) -> bool:
    """Return whether a person has given a setting; for a config made by code, whether it is not the default.

    >>> is_given(RunConfig(epochs=3), "epochs"), is_given(remember_given(RunConfig(epochs=3), []), "epochs")
    (True, False)
    """
    names: frozenset[str] | None = getattr(config, _GIVEN, None)
    if names is not None:
        return name in names
    return bool(dict(flatten(config))[name] != dict(flatten(RunConfig()))[name])


def with_values(config: C, **values: Any) -> C:
    """Return the config with other values, and the same memory of what was given."""
    changed = replace(config, **values)
    names: frozenset[str] | None = getattr(config, _GIVEN, None)
    return changed if names is None else remember_given(changed, names)
