"""State of objects that a run tracks (schedulers, EMA, counters), as tensors and JSON: nothing is pickled."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from paceline.errors import ConfigError


class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
}
_PLAIN = (bool, int, float, str, type(None))


def encode(state: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return a state as JSON; its tensors are added to `tensors`. Raises for a value that would not come back as it is.

    >>> encode({"milestones": collections.Counter({3: 1})}, {}, "scheduler")
    {'dict': [['milestones', {'Counter': [[3, 1]]}]]}
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if isinstance(state, Tensor):
        tensors[where] = state.detach()
        return {"tensor": where}
    if isinstance(state, numpy.ndarray) and state.dtype != object:
        tensors[where] = torch.from_numpy(numpy.ascontiguousarray(state)).reshape(state.shape)
        return {"array": where}
    if kind is list:
        return [encode(item, tensors, f"{where}.{at}") for at, item in enumerate(state)]
    if kind.__name__ in _SEQUENCES and kind.__module__ in {"builtins", "collections"}:
        items = sorted(state, key=repr) if isinstance(state, set | frozenset) else state
        return {
            kind.__name__: [encode(item, tensors, f"{where}.{at}") for at, item in enumerate(items)]
        }
    if kind.__name__ in _MAPPINGS and kind.__module__ in {"builtins", "collections"}:
        pairs = []
        for key, value in state.items():
            pairs.append([encode(key, tensors, where), encode(value, tensors, f"{where}.{key}")])
        return {kind.__name__: pairs}
    raise ConfigError(
        f"{where} in the tracked state is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        fix="return numbers, strings, tensors, lists, tuples and dicts from state_dict()",
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `encode` was given.

    >>> decode(encode({1: (2, None)}, {}, "x"), {})
    {1: (2, None)}
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(item, tensors) for item in content])
    return _MAPPINGS[kind]([(decode(key, tensors), decode(item, tensors)) for key, item in content])


PREFIX = "tracked."
"""Begins the names of the tensors of tracked objects in a checkpoint."""


class Tracked:
    """The objects that a run saves and restores beside models and optimizers."""

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}

    def add(self, name: str, item: Any) -> None:
        """Add an object; raise if it has no state that can be saved."""
        if not callable(getattr(item, "state_dict", None)) or not callable(
            getattr(item, "load_state_dict", None)
        ):
            raise ConfigError(
                f"run.track({name}=...): {type(item).__name__} has no state_dict and load_state_dict",
                fix="add both methods, or track the numbers that it depends on",
            )
        if name in self.objects:
            raise ConfigError(f"the run tracks {name} already", fix="choose another name")
        self.objects[name] = item

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state of all objects as JSON, and its tensors by name."""
        tensors: dict[str, Tensor] = {}
        values = {}
        for name, item in self.objects.items():
            values[name] = encode(item.state_dict(), tensors, f"{PREFIX}{name}")
        return values, tensors

    def restore(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        """Restore all objects; return a line for each that was not saved, or is not tracked any more."""
        problems = [
            f"{name} is tracked, but was not saved" for name in self.objects if name not in values
        ]
        problems += [
            f"{name} was saved, but is not tracked" for name in values if name not in self.objects
        ]
        if not problems:
            for name, item in self.objects.items():
                item.load_state_dict(decode(values[name], tensors))
        return problems

    @property
    def schedulers(self) -> list[Stateful]:
        """The tracked objects that set the learning rate."""
        from torch.optim import lr_scheduler

        kinds = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
        return [item for item in self.objects.values() if isinstance(item, kinds)]
