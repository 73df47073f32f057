"""How words and TOML values become typed settings, and how settings become TOML."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError, did_you_mean

C = TypeVar("C")

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def field_types(kind: type) -> dict[str, Any]:
    """Return every setting of a config class by its dotted name, with its type."""
    found: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        inner = hints[item.name]
        if dataclasses.is_dataclass(inner):
            found |= {f"{item.name}.{name}": hint for name, hint in field_types(inner).items()}  # type: ignore[arg-type]
        else:
            found[item.name] = inner
    return found


def with_settings(config: C, settings: Mapping[str, Any]) -> C:
    """Return the config with dotted settings replaced; all of them at once, so that they are judged together."""
    types = field_types(type(config))
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in types:
            raise ConfigError(f"there is no setting {name!r}", fix=did_you_mean(name, types))
        _place(nested, name.split("."), typed(name, value, types[name]))
    return _replace(config, nested)


def typed(name: str, value: Any, kind: Any) -> Any:
    """Turn a word of the command line, or a TOML value, into the field's type, or say why not.

    >>> typed("seed", "7", int), typed("exact", "no", bool), typed("lr.base", 1, float)
    (7, False, 1.0)
    """
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if isinstance(value, bool):
            value = str(value).lower()
        if value in choices:
            return value
        raise ConfigError(
            f"{name}={value} is not a choice", fix=did_you_mean(str(value), map(str, choices))
        )
    try:
        return _CONVERT[kind](value)
    except (ValueError, TypeError, KeyError) as error:
        word = getattr(kind, "__name__", str(kind))
        raise ConfigError(
            f"{name}={value!r} is not of type {word}",
            fix=f"give {name} as {_EXAMPLE.get(kind, word)}",
        ) from error


def flatten(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every setting as (dotted name, value), in the order of the class."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from ((f"{item.name}.{name}", inner) for name, inner in flatten(value))
        else:
            yield item.name, value


def to_toml(config: Any) -> str:
    """Write a config as TOML that reads back to the same config."""
    top: list[str] = []
    tables: dict[str, list[str]] = {}
    for name, value in flatten(config):
        table, _, leaf = name.rpartition(".")
        (tables.setdefault(table, []) if table else top).append(f"{leaf} = {_toml_value(value)}")
    for table, lines in tables.items():
        top += ["", f"[{table}]", *lines]
    return "\n".join(top) + "\n"


def from_toml(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a parsed TOML file into dotted settings."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= from_toml(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return repr(value)


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(value)
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    return float(value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if not isinstance(value, str) or word not in _TRUE | _FALSE:
        raise ValueError(value)
    return word in _TRUE


def _to_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _to_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(value)
    return tuple(_to_str(each) for each in value)


_CONVERT: dict[Any, Callable[[Any], Any]] = {
    int: _to_int,
    float: _to_float,
    bool: _to_bool,
    str: _to_str,
    tuple[str, ...]: _to_texts,
}
_EXAMPLE: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple[str, ...]: 'a list of texts, such as ["a", "b"]',
}


def _place(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _replace(config: C, tree: Mapping[str, Any]) -> C:
    changes = {
        key: _replace(getattr(config, key), value) if isinstance(value, dict) else value
        for key, value in tree.items()
    }
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]
