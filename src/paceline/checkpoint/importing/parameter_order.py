"""Which weight an optimizer means by the number of a parameter: torch saves the state without names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.checkpoint.importing.stored_tensor import StoredTensor

Shape = tuple[int, ...]
Key = int | str
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_NAMED = "build the optimizer from model.named_parameters(), which saves the names"


class Unmatched(Exception):
    """The reason why the parameters of an optimizer cannot be told apart."""


class ParameterGroup(NamedTuple):
    """The parameters of one group of an optimizer, as it saved them."""

    keys: tuple[Key, ...]
    names: tuple[str, ...] = ()
    """Empty if the optimizer was not built from named parameters."""


def match_parameters(
    groups: Sequence[ParameterGroup],
    shapes: Mapping[Key, Shape],
    weights: Mapping[str, StoredTensor],
    *,
    ordered: bool,
) -> dict[Key, str]:
    """Return the weight of each parameter that has a state; raise `Unmatched` if that is not certain."""
    keys = [key for group in groups for key in group.keys]
    names = [name for group in groups for name in group.names]
    if len(names) == len(keys):
        matched = dict(zip(keys, names, strict=True))
    elif all(isinstance(key, str) for key in keys):
        matched = {key: str(key) for key in keys}
    else:
        trained = list(trained_names(weights))
        if len(trained) != len(keys):
            count = f"it has {len(keys)} parameters, the weights have {len(trained)}"
            raise Unmatched(f"{count}; {_NAMED}")
        if ordered and len(groups) == 1:
            matched = dict(zip(keys, trained, strict=True))
        else:
            matched = _match_shapes(groups, shapes, weights, ordered=ordered)
    _check(matched, shapes, weights)
    return matched


def trained_names(weights: Mapping[str, StoredTensor]) -> Iterable[str]:
    """Return the weights that may be parameters: not integers, not BatchNorm statistics, tied ones once."""
    seen = set()
    for name, value in weights.items():
        is_float = "F" in value.dtype or value.dtype.startswith("C")
        if is_float and not name.endswith(_BUFFERS) and value not in seen:
            seen.add(value)
            yield name


def _match_shapes(
    groups: Sequence[ParameterGroup],
    shapes: Mapping[Key, Shape],
    weights: Mapping[str, StoredTensor],
    *,
    ordered: bool,
) -> dict[Key, str]:
    """Match by shape, and among equal shapes by order, if one group has them all and the order is known."""
    named: dict[Shape, list[str]] = {}
    for name in trained_names(weights):
        named.setdefault(weights[name].shape, []).append(name)
    matched: dict[Key, str] = {}
    for group in groups:
        of_shape: dict[Shape, list[Key]] = {}
        for key in group.keys:
            if key not in shapes:
                raise Unmatched(f"parameter {key} has no state that shows its shape; {_NAMED}")
            of_shape.setdefault(shapes[key], []).append(key)
        for shape, keys in of_shape.items():
            names = named.get(shape, [])
            if len(names) != len(keys):
                raise Unmatched(f"its groups share the shape {list(shape)}; {_NAMED}")
            if len(names) > 1 and not ordered:
                equal = f"{len(names)} weights have the shape {list(shape)}"
                raise Unmatched(f"{equal}, and safetensors does not keep their order; {_NAMED}")
            matched.update(zip(keys, names, strict=True))
        _check_order(group, matched, list(weights), ordered=ordered)
    return matched


def _check_order(
    group: ParameterGroup, matched: Mapping[Key, str], names: list[str], *, ordered: bool
) -> None:
    places = [names.index(matched[key]) for key in group.keys]
    if ordered and places != sorted(places):
        raise Unmatched(f"its parameters are not in the order of the weights; {_NAMED}")


def _check(
    matched: Mapping[Key, str], shapes: Mapping[Key, Shape], weights: Mapping[str, StoredTensor]
) -> None:
    for key, name in matched.items():
        if name not in weights:
            raise Unmatched(f"its parameter {name} is not among the weights")
        wanted = weights[name].shape
        if shapes.get(key, wanted) != wanted:
            sizes = f"{list(shapes[key])}, the weight {name} has {list(wanted)}"
            raise Unmatched(f"parameter {key} has the shape {sizes}; {_NAMED}")
