"""A class of settings may change the defaults of `RunConfig`, not the types of its fields."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

from paceline.config.schema import RunConfig
from paceline.errors import ConfigError


def refuse_redefined(kind: type[RunConfig]) -> None:
    """Raise if a class derived from RunConfig has a field of the same name and another type.

    >>> refuse_redefined(RunConfig)
    """
    _refuse_no_fields(kind)
    own, usual = get_type_hints(kind), get_type_hints(RunConfig)
    for item in dataclasses.fields(RunConfig):
        if own[item.name] == usual[item.name]:
            continue
        what, instead = _described(item.name, usual[item.name])
        default = getattr(kind, item.name, None)
        if get_origin(usual[item.name]) is not None and default in get_args(usual[item.name]):
            instead = (
                f"to change its default, write {item.name}: {_name(usual[item.name])} = {default!r}"
            )
        raise ConfigError(
            f"{kind.__name__}.{item.name} has the name of {what}, and another type: {_name(own[item.name])}",
            fix=f"rename the field, for example own_{item.name}; or {instead}",
        )


def _refuse_no_fields(kind: type[RunConfig]) -> None:
    """Raise for attributes of a derived class that `dataclass` does not make to settings, so that they have no effect."""
    own = kind.__mro__[: kind.__mro__.index(RunConfig)]
    names = {item.name: item for item in dataclasses.fields(RunConfig)}
    for each in own:
        annotated = vars(each).get("__annotations__", {})
        if annotated and "__dataclass_fields__" not in vars(each):
            raise ConfigError(
                f"{each.__name__} is not a dataclass, so {next(iter(annotated))} is no setting",
                fix=f"write @dataclass(frozen=True) above `class {each.__name__}`",
            )
        for name in names.keys() & vars(each).keys() - annotated.keys():
            if hasattr(vars(each)[name], "__get__"):
                continue  # a slot, or a method
            kind_of = _name(get_type_hints(RunConfig)[name])
            raise ConfigError(
                f"{each.__name__}.{name} has no annotation, so it does not change the setting",
                fix=f"write {name}: {kind_of} = {vars(each)[name]!r}",
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
