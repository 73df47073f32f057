"""Nested batches: dicts, lists, tuples, NamedTuples and dataclasses with tensors in them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

from torch import Tensor

Nest: TypeAlias = Any
"""A tensor, or any nest of tensors; other values, such as strings, are left as they are."""


def map_leaves(function: Callable[[Any], Any], nest: Nest) -> Nest:
    """Return the same nest, with the function applied to everything that is not a container.

    >>> map_leaves(lambda leaf: leaf * 2, {"a": [1, (2, "b")]})
    {'a': [2, (4, 'bb')]}
    """
    if can_move(nest):
        return function(nest)
    if isinstance(nest, Mapping):
        return _map_mapping(function, nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_leaves(function, value) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)([map_leaves(function, value) for value in nest])
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return _map_dataclass(function, nest)
    return function(nest)


def can_move(leaf: Any) -> bool:
    """Whether a value is a tensor, or copies itself to a device as a BatchEncoding does."""
    return isinstance(leaf, Tensor) or (
        not isinstance(leaf, type) and callable(getattr(leaf, "to", None))
    )


def leaves_of(nest: Nest) -> Iterator[Any]:
    """Yield everything in a nest that is not a container.

    >>> list(leaves_of({"a": [1, (2, "b")]}))
    [1, 2, 'b']
    """
    found: list[Any] = []
    map_leaves(found.append, nest)
    return iter(found)


def form_of(nest: Nest) -> Any:
    """Return what two nests of one form share, as a key of a dict: containers, keys, shapes and dtypes of tensors.

    >>> import torch
    >>> form_of({"x": torch.zeros(2)}) == form_of({"x": torch.ones(2)})
    True
    >>> form_of({"x": torch.zeros(2)}) == form_of({"y": torch.zeros(2)})
    False
    """
    if isinstance(nest, Tensor):
        return nest.shape, nest.dtype
    if isinstance(nest, Mapping):
        return type(nest), tuple((key, form_of(value)) for key, value in nest.items())
    if isinstance(nest, list | tuple):
        return type(nest), tuple(map(form_of, nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [one.name for one in dataclasses.fields(nest)]
        return type(nest), tuple(form_of(getattr(nest, name)) for name in names)
    return type(nest)


def to_device(nest: Nest, device: str, *, non_blocking: bool = False) -> Nest:
    """Copy the tensors of a nest to a device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if can_move(leaf) else leaf

    return map_leaves(move, nest)


def is_pinned(nest: Nest) -> bool:
    """Whether all that must be copied to a GPU lies in pinned memory."""
    moving = [leaf for leaf in leaves_of(nest) if can_move(leaf)]
    return all(isinstance(leaf, Tensor) and leaf.is_pinned() for leaf in moving)


def device_of(nest: Nest) -> str:
    """Return the device of the first tensor; cpu without any."""
    for leaf in leaves_of(nest):
        if isinstance(leaf, Tensor):
            return str(leaf.device)
    return "cpu"


def describe(nest: Any) -> str:
    """Return the types and shapes of a sample, for messages.

    >>> describe({"ids": [1, 2], "label": 3})
    '{ids: list of 2 int, label: int}'
    """
    if isinstance(nest, Mapping):
        return "{" + ", ".join(f"{key}: {describe(nest[key])}" for key in nest) + "}"
    if isinstance(nest, tuple):
        return "(" + ", ".join(map(describe, nest)) + ")"
    if isinstance(nest, list):
        return f"list of {len(nest)} {describe(nest[0])}" if nest else "empty list"
    name = type(nest).__name__
    if hasattr(nest, "shape"):
        return f"{name}{list(nest.shape)}"
    return name


def _map_mapping(function: Callable[[Any], Any], nest: Mapping[Any, Any]) -> Any:
    mapped = {key: map_leaves(function, value) for key, value in nest.items()}
    if type(nest) is dict or not isinstance(nest, MutableMapping):
        return mapped
    clone = copy.copy(nest)  # keeps the class, and what it knows besides its items
    clone.update(mapped)
    return clone


def _map_dataclass(function: Callable[[Any], Any], nest: Any) -> Any:
    clone = copy.copy(nest)
    for field in dataclasses.fields(nest):
        value = map_leaves(function, getattr(nest, field.name))
        object.__setattr__(clone, field.name, value)  # a frozen dataclass, too
    return clone
