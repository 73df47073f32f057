"""How texts and TOML values become typed settings, and how settings become TOML."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from paceline.config.lanes import AutoLanes
from paceline.config.renamed import RENAMED
from paceline.errors import ConfigError, did_you_mean

C = TypeVar("C")

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of every setting of a config class, by its dotted name."""
    types: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if not dataclasses.is_dataclass(hint):
            types[item.name] = hint
            continue
        for name, inner in field_types(hint).items():  # type: ignore[arg-type]
            types[f"{item.name}.{name}"] = inner
    return types


def with_settings(config: C, settings: Mapping[str, Any]) -> C:
    """Return the config with dotted settings replaced, all at once because they are checked together."""
    types = field_types(type(config))
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in types:
            raise ConfigError(f"there is no setting {name!r}", fix=_renamed_or_near(name, types))
        is_auto = name == "batch.lanes" and value == "auto"
        _set_nested(nested, name.split("."), value if is_auto else typed(name, value, types[name]))
    return _replace(config, nested)


_OTHER_NAMES = {
    "lr": "lr.base",
    "learning_rate": "lr.base",
    "batch": "batch.global_size",
    "batch_size": "batch.global_size",
    "bs": "batch.global_size",
    "per_device_train_batch_size": "batch.global_size",
    "gradient_accumulation_steps": "batch.lanes",
    "accumulate": "batch.lanes",
    "workers": "read.workers",
    "num_workers": "read.workers",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "warmup": "lr.warmup_samples",
    "warmup_steps": "lr.warmup_samples",
    "scheduler": "lr.schedule",
    "lr_scheduler_type": "lr.schedule",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "amp": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "random_seed": "seed",
    "log_interval": "log.every_steps",
    "logging_steps": "log.every_steps",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluate_steps",
    "output_dir": "runs",
    "log_dir": "runs",
    "wandb": "log.to",
    "resume_from": "resume",
    "fsdp": "parallel",
    "ddp": "parallel",
    "read": "read.workers",
    "checkpoint": "checkpoint.every",
    "log": "log.to",
}
"""Settings of Paceline by the names that people know from other programs, and by the name of their group."""
_OTHER_VALUES = {
    "gpu": "cuda",
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "32": "fp32",
    "true": "auto",
    "false": "never",
}
START_RANKS = "give the number of ranks to the launcher: paceline run -n 4 SCRIPT"
_NOT_SETTINGS = {"gpus", "nproc", "nproc_per_node", "num_gpus", "world_size", "ranks", "n"}


def near_setting(name: str, known: Iterable[str]) -> str:
    """Return what to type instead of a setting that does not exist.

    >>> near_setting("lr", ["lr.base", "lr.rule"]), near_setting("gpus", [])
    ('did you mean lr.base?', 'give the number of ranks to the launcher: paceline run -n 4 SCRIPT')
    """
    choices = list(known)
    if (other := _OTHER_NAMES.get(name.replace("-", "_"))) in choices:
        return f"did you mean {other}?"
    if name.replace("-", "_") in _NOT_SETTINGS:
        return START_RANKS
    return did_you_mean(name, choices)


def _renamed_or_near(name: str, types: Mapping[str, Any]) -> str:
    new = RENAMED.get(name)
    return f"use {new}, its new name" if new in types else near_setting(name, types)


def typed(name: str, value: Any, kind: Any) -> Any:
    """Return a text of the command line, or a TOML value, as the type of its field.

    >>> typed("seed", "7", int), typed("exact", "no", bool), typed("lr.base", 1, float)
    (7, False, 1.0)
    """
    if get_origin(kind) is Literal:
        return _one_of(name, value, get_args(kind))
    if kind not in _FORMATS:
        raise ConfigError(
            f"the setting {name} has the type {getattr(kind, '__name__', kind)}, which no setting can have",
            fix="annotate it as int, float, bool, str, pathlib.Path, tuple[str, ...] or Literal[...]",
        )
    format_ = _FORMATS[kind]
    try:
        return format_.convert(value)
    except (ValueError, TypeError) as error:
        example = (
            f"{name} {format_.example}" if name.startswith("-") else f"{name}={format_.example}"
        )
        raise ConfigError(
            f"{name} must be {format_.noun}, got {value!r}", fix=f"for example: {example}"
        ) from error


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if isinstance(value, bool):
        value = str(value).lower()
    if value in choices:
        return value
    names = [str(choice) for choice in choices]
    if (other := _OTHER_VALUES.get(str(value).lower())) in names:
        raise ConfigError(
            f"{name} must be one of {', '.join(names)}; got {value!r}",
            fix=f"did you mean {other}?",
        )
    raise ConfigError(
        f"{name} must be one of {', '.join(names)}; got {value!r}",
        fix=did_you_mean(str(value), names),
    )


def flatten(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every setting as (dotted name, value), in the order of the class."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from ((f"{item.name}.{name}", inner) for name, inner in flatten(value))
        else:
            yield item.name, value


def to_toml(config: Any) -> str:
    """Return a config as TOML that reads back to the same config."""
    top: list[str] = []
    tables: dict[str, list[str]] = {}
    for name, value in flatten(config):
        table, _, leaf = name.rpartition(".")
        lines = tables.setdefault(table, []) if table else top
        lines.append(f"{leaf} = {_toml_value(value)}")
    for table, lines in tables.items():
        top += ["", f"[{table}]", *lines]
    return "\n".join(top) + "\n"


def from_toml(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a parsed TOML file by their dotted names."""
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            settings |= from_toml(value, f"{name}.")
        else:
            settings[name] = value
    return settings


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, AutoLanes):
        return '"auto"'
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
    text = str(value).lower()
    if not isinstance(value, str) or text not in _TRUE | _FALSE:
        raise ValueError(value)
    return text in _TRUE


def _to_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _to_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(value)
    return tuple(_to_str(each) for each in value)


class _Format(NamedTuple):
    """How values of one type are written."""

    convert: Callable[[Any], Any]
    noun: str
    example: str


_FORMATS: dict[Any, _Format] = {
    int: _Format(_to_int, "a whole number", "4"),
    float: _Format(_to_float, "a number", "0.5"),
    bool: _Format(_to_bool, "true or false", "true"),
    str: _Format(_to_str, "a text", '"name"'),
    Path: _Format(Path, "a path", "folder"),
    tuple[str, ...]: _Format(_to_texts, "a list of texts", '["a", "b"]'),
}


def _set_nested(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _replace(config: C, tree: Mapping[str, Any]) -> C:
    changes: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = isinstance(value, dict)
        changes[key] = _replace(getattr(config, key), value) if is_group else value
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]
