"""Which settings a person has given.

These come before the arguments of a script, those before what suits a GPU, and that before defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from paceline.config.schema import RunConfig
from paceline.config.values import flatten
from paceline.errors import PacelineError

C = TypeVar("C", bound=RunConfig)
_GIVEN, _CHOSEN = "_given", "_chosen"


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
    return bool(dict(flatten(config))[name] != dict(flatten(_defaults(config)))[name])


def _defaults(config: RunConfig) -> RunConfig:
    """Return the config that its class makes without arguments; one of `RunConfig` if it needs some."""
    try:
        return type(config)()
    except (PacelineError, TypeError):
        return RunConfig()


def with_values(config: C, **values: Any) -> C:
    """Return the config with other values, and the same memory of what was given and chosen."""
    changed = replace(config, **values)
    for memory in (_GIVEN, _CHOSEN):
        if hasattr(config, memory):
            object.__setattr__(changed, memory, getattr(config, memory))
    return changed


def choose(config: C, values: Mapping[str, Any]) -> C:
    """Return the config with values that suit the device, and remember that nobody has given them.

    >>> chosen(choose(RunConfig(), {"precision": "bf16"}))
    ('precision',)
    """
    changed = with_values(config, **values)
    object.__setattr__(changed, _CHOSEN, (*chosen(config), *values))
    return changed


def chosen(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the settings that suit the device, and that nobody has given."""
    names: tuple[str, ...] = getattr(config, _CHOSEN, ())
    return names
