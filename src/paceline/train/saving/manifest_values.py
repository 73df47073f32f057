"""Whether the values of a manifest have the types with which a run saves them: a right checksum does not prove it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import Manifest
from paceline.config import RunConfig
from paceline.config.values import flatten
from paceline.data.reading.comparison import DataFacts
from paceline.exact.state import KERNELS, group_names
from paceline.train.saving.imported_state import is_imported
from paceline.train.saving.tracked import decode

_NUMBER_TYPES = {"int", "float", "bool", "str"}


def check_values(
    manifest: Manifest,
    config: RunConfig,
    meters: Iterable[str],
    optimizers: Mapping[str, torch.optim.Optimizer],
    facts: Mapping[str, str],
) -> None:
    """Raise ValueError, TypeError or KeyError if a run cannot have saved these values.

    `facts` are the options with which the script has made the optimizers.
    """
    values = manifest.values
    _check_settings(manifest.config, dict(flatten(config)))
    if not set(_texts(values["numbers"]).values()) <= _NUMBER_TYPES:
        raise ValueError("a type of a number in the optimizer state is unknown")
    if is_imported(manifest):
        facts = values["imported"]
        _texts(dict.fromkeys(facts["optimizer_state"], ""))
        for state in [facts.get("schedulers", []), *facts.get("groups", [])]:
            decode(state, {})
        return
    _texts(values["optimizer"])["optimizer"]
    _require(type(values["dataset_samples"]) is int, "the number of samples")
    _check_data(values.get("data"))
    for name in meters:
        _require(_is_pair(values["meters"][name]), f"the sums of {name}")
    for rates in dict(values.get("rates", {})).values():
        _require(isinstance(rates, list) and all(map(_is_number, rates)), "the rates")
    for table in dict(values.get("modules", {})).values():
        ok = isinstance(table, dict) and all(
            isinstance(each, int | float) for each in table.values()
        )
        _require(ok, "the numbers of modules")
    for state in values.get("precision") or []:
        _require(_is_pair(state), "the gradient scale")
    _require(isinstance(values.get("finished", ""), str), "the reason to finish")
    changed = {name for name, fact in facts.items() if values["optimizer"].get(name) != fact}
    _texts(values.get("script", {}))
    _check_groups(values.get("groups", {}), optimizers, changed)
    stand_in: Mapping[str, Tensor] = defaultdict(lambda: torch.empty(0))
    for name in ("tracked", "stream"):
        for state in dict(values.get(name, {})).values():
            decode(state, stand_in)


def _check_data(stored: Any) -> None:
    """Check what is compared of the dataset; None: a stream, or a checkpoint of an earlier version."""
    if stored is not None:
        DataFacts.of(stored)


def _check_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        _require(is_list or isinstance(value, bool | int | float | str), f"the setting {name}")
        if name in now and _is_number(now[name]):
            _require(_is_number(value), f"the setting {name}")


def _check_groups(
    groups: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], changed: set[str]
) -> None:
    """Check the types of saved options. Those that the script has changed since are refused by name elsewhere."""
    names = iter(group_names())
    for name, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            fact = next(names)
            saved = decode(groups.get(f"{name}.{number}", {"dict": []}), {})
            _require(isinstance(saved, dict), f"the options of {name}")
            for key, value in saved.items():
                if key in KERNELS or key not in group or f"{fact}.{key}" in changed:
                    continue
                _require(_are_alike(group[key], value), f"the option {key} of {name}")


def _are_alike(now: Any, saved: Any) -> bool:
    """Return whether a saved option may take the place of another.

    >>> _are_alike(0.1, 3), _are_alike(0.1, "text"), _are_alike((0.9, 0.99), (0.9, None)), _are_alike(None, True)
    (True, False, False, False)
    """
    if _is_number(now) or isinstance(now, Tensor):
        return _is_number(saved)
    if now is None:
        return saved is None or _is_number(saved)
    if isinstance(now, list | tuple) and type(saved) is type(now):
        return len(saved) == len(now) and all(map(_are_alike, now, saved))
    return type(saved) is type(now)


def _texts(table: Mapping[str, Any]) -> Mapping[str, str]:
    _require(all(isinstance(text, str) for text in table.values()), "a table of texts")
    return table


def _is_pair(value: Any) -> bool:
    """Return whether a value is a pair of numbers, as meters and gradient scales are saved."""
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(ok: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not ok:
        raise ValueError(f"{what} has the wrong type")
