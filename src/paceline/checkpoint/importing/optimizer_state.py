"""The state of torch optimizers, as a run saves it: by the names of the weights, or by the places of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.checkpoint.importing.stored_tensor import StoredTensor, read_number, store_number
from paceline.checkpoint.importing.tree import NotPlain, plain_json
from paceline.checkpoint.importing.weight_names import WRAPPERS, common_prefix

Key = int | str
Shape = tuple[int, ...]


class Unmatched(Exception):
    """The reason why the state of an optimizer cannot be imported."""


class OptimizerState(NamedTuple):
    """The state of the optimizers, or why it is left out."""

    tensors: Mapping[str, StoredTensor] = {}
    """By `KIND.NAME`, such as `exp_avg.layer.weight`; `exp_avg.#0.7` is parameter 7 of optimizer 0 in their order."""
    numbers: Mapping[str, str] = {}
    """The Python type of each value that was a number."""
    kinds: tuple[str, ...] = ()
    places: tuple[tuple[tuple[Shape | None, ...], ...], ...] = ()
    """The shape of every parameter of every group of each optimizer; None without a state, () for a named optimizer."""
    groups: tuple[tuple[Any, ...], ...] = ()
    """The options of every group of each optimizer, as JSON."""
    learning_rate: float | None = None
    updates: int = 0
    """The largest number of updates that an optimizer has counted; 0 if it counts none."""
    left_out: str = ""


def read_optimizers(
    saved: Sequence[Any], weights: Mapping[str, StoredTensor], prefix: str
) -> OptimizerState:
    """Return the state of all optimizers; `prefix` was removed from the names of the weights.

    torch numbers the parameters in the order in which the script gave them to the optimizer. Which weight a number means is
    known only where the script builds its optimizer again: at `run.steps`.
    """
    if not saved:
        return OptimizerState()
    rate = _learning_rate(saved[0])
    try:
        found = [
            _read_optimizer(each, number, weights, prefix) for number, each in enumerate(saved)
        ]
    except Unmatched as reason:
        return OptimizerState(left_out=str(reason), learning_rate=rate)
    tensors = {name: value for each in found for name, value in each.tensors.items()}
    if not tensors:
        return OptimizerState(left_out="it is empty", learning_rate=rate)
    return OptimizerState(
        tensors,
        {name: kind for each in found for name, kind in each.numbers.items()},
        tuple(sorted({name.partition(".")[0] for name in tensors})),
        tuple(each.places for each in found),
        tuple(each.groups for each in found),
        rate,
        max(each.updates for each in found),
    )


class _Optimizer(NamedTuple):
    """One optimizer of the file."""

    tensors: Mapping[str, StoredTensor]
    numbers: Mapping[str, str]
    places: tuple[tuple[Shape | None, ...], ...]
    groups: tuple[Any, ...]
    updates: int


def _read_optimizer(
    saved: Any, number: int, weights: Mapping[str, StoredTensor], prefix: str
) -> _Optimizer:
    state, groups = _parts(saved)
    keys: list[Key] = [key for group in groups for key in group.get("params", ())]
    named = _named(groups, keys, weights, prefix)
    names = named or {key: f"#{number}.{place}" for place, key in enumerate(keys)}
    tensors: dict[str, StoredTensor] = {}
    numbers: dict[str, str] = {}
    updates = 0.0
    for key, values in state.items():
        if key not in names:
            raise Unmatched(f"it has a state for parameter {key}, which is in none of its groups")
        for kind, value in values.items():
            name = f"{kind}.{names[key]}"
            if isinstance(value, bool | int | float):
                numbers[name] = type(value).__name__
                tensors[name] = store_number(value)
            elif value is not None:
                tensors[name] = _checked(kind, value)
        updates = max(updates, read_number(values.get("step")) or 0.0)
    if named:
        _check_shapes(named, state, weights)
    shapes = [
        tuple(_shape(state.get(key, {})) for key in group.get("params", ())) for group in groups
    ]
    options = tuple(_options(group) for group in groups)
    return _Optimizer(tensors, numbers, () if named else tuple(shapes), options, int(updates))


def _parts(saved: Any) -> tuple[Mapping[Key, Mapping[str, Any]], list[dict[str, Any]]]:
    """Return states and groups of what `optimizer.state_dict()` returned."""
    problem = "it is not what optimizer.state_dict() returns"
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        raise Unmatched(problem)
    state, groups = saved["state"], saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise Unmatched(problem)
    if not all(isinstance(each, dict) for each in state.values()):
        raise Unmatched(problem)
    return state, groups


def _named(
    groups: Sequence[Mapping[str, Any]],
    keys: Sequence[Key],
    weights: Mapping[str, StoredTensor],
    prefix: str,
) -> dict[Key, str]:
    """Return the weight of each parameter if the optimizer saved names; else nothing."""
    names = [str(name) for group in groups for name in group.get("param_names", ())]
    if len(names) != len(keys):
        if not keys or not all(isinstance(key, str) for key in keys):
            return {}
        names = [str(key) for key in keys]
    before = prefix if all(name.startswith(prefix) for name in names) else ""
    before = before or common_prefix(names, WRAPPERS)
    plain = [name.removeprefix(before) for name in names]
    for name in plain:
        if name not in weights:
            raise Unmatched(f"its parameter {name} is not among the weights")
    return dict(zip(keys, plain, strict=True))


def _shape(values: Mapping[str, Any]) -> Shape | None:
    """Return the shape of a parameter, which its state has, except for counts; None if that is not certain."""
    shapes = {
        value.shape
        for kind, value in values.items()
        if isinstance(value, StoredTensor) and kind != "step"
    }
    shapes = {shape for shape in shapes if shape} or shapes
    return shapes.pop() if len(shapes) == 1 else None


def _check_shapes(
    named: Mapping[Key, str],
    state: Mapping[Key, Mapping[str, Any]],
    weights: Mapping[str, StoredTensor],
) -> None:
    for key, name in named.items():
        wanted = weights[name].shape
        shape = _shape(state.get(key, {}))
        if shape is not None and shape != wanted:
            raise Unmatched(f"the state of {name} has the shape {list(shape)}, not {list(wanted)}")


def _checked(kind: str, value: Any) -> StoredTensor:
    if not isinstance(value, StoredTensor) or not isinstance(kind, str) or "." in kind:
        raise Unmatched(f"its state {kind} is a {type(value).__name__}, not a tensor or a number")
    return value


def _options(group: Mapping[str, Any]) -> Any:
    """Return the options of a group as JSON: a scheduler has changed some of them."""
    options = {}
    for name, value in group.items():
        if name in {"params", "param_names"}:
            continue
        number = read_number(value)
        try:
            options[str(name)] = plain_json(value if number is None else number)
        except NotPlain:
            continue
    return {"dict": [[name, value] for name, value in options.items()]}


def _learning_rate(saved: Any) -> float | None:
    """Return the learning rate of the first group, for people: a run has its own setting."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    first = groups[0] if isinstance(groups, list) and groups else None
    return read_number(first.get("lr")) if isinstance(first, dict) else None
