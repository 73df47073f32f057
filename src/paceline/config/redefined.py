"""A class of settings may change the defaults of `RunConfig`, not the types of its fields."""

from __future__ import annotations

import dataclasses
from typing import Any, get_origin, get_type_hints

from paceline.config.schema import RunConfig
from paceline.errors import ConfigError


def refuse_redefined(kind: type[RunConfig]) -> None:
    """Raise if a class derived from RunConfig has a field of the same name and another type.

    >>> refuse_redefined(RunConfig)
    """
    own, usual = get_type_hints(kind), get_type_hints(RunConfig)
    for item in dataclasses.fields(RunConfig):
        if own[item.name] == usual[item.name]:
            continue
        what, instead = _described(item.name, usual[item.name])
        raise ConfigError(
            f"{kind.__name__}.{item.name} has the name of {what}, and another type: {_name(own[item.name])}",
            fix=f"rename the field, for example own_{item.name}; or {instead}",
        )


def _described(name: str, kind: Any) -> tuple[str, str]:
    """Return what a field of RunConfig is, and how to use it."""
    if dataclasses.is_dataclass(kind):
        first = dataclasses.fields(kind)[0].name
        return (
            f"a group of settings of every run ({name}.{first}, ...)",
            f"use its settings: config.{name}.{first}",
        )
    return f"a setting of every run ({_name(kind)})", f"use the setting: config.{name}"


def _name(kind: Any) -> str:
    return str(kind).replace("typing.", "") if get_origin(kind) else kind.__name__
