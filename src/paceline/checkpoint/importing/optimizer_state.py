"""The state of a torch optimizer by the names of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.checkpoint.importing.parameter_order import (
    Key,
    ParameterGroup,
    Shape,
    Unmatched,
    match_parameters,
)
from paceline.checkpoint.importing.stored_tensor import StoredTensor, store_number
from paceline.checkpoint.importing.weight_names import WRAPPERS, common_prefix

State = Mapping[Key, Mapping[str, Any]]


class OptimizerState(NamedTuple):
    """The state of an optimizer, or why it is left out."""

    tensors: Mapping[str, StoredTensor] = {}
    """By `KIND.NAME`, such as `exp_avg.layer.weight`."""
    numbers: Mapping[str, str] = {}
    """The Python type of each value that was a number."""
    kinds: tuple[str, ...] = ()
    learning_rate: float | None = None
    left_out: str = ""


def name_state(
    optimizers: Sequence[Any], weights: Mapping[str, StoredTensor], *, ordered: bool
) -> OptimizerState:
    """Return the state of the only optimizer, under the names of the weights."""
    if not optimizers:
        return OptimizerState()
    if len(optimizers) > 1:
        return OptimizerState(left_out=f"there are {len(optimizers)} optimizers, a run has one")
    try:
        return _name_state(optimizers[0], weights, ordered=ordered)
    except Unmatched as reason:
        return OptimizerState(left_out=str(reason), learning_rate=_learning_rate(optimizers[0]))


def _name_state(
    saved: Any, weights: Mapping[str, StoredTensor], *, ordered: bool
) -> OptimizerState:
    state, groups = _parts(saved)
    if not any(state.values()):
        return OptimizerState(learning_rate=_learning_rate(saved), left_out="it is empty")
    shapes = {key: shape for key, values in state.items() if (shape := _shape(values)) is not None}
    matched = match_parameters(groups, shapes, weights, ordered=ordered)
    tensors: dict[str, StoredTensor] = {}
    numbers = {}
    for key, values in state.items():
        if key not in matched:
            raise Unmatched(f"it has a state for parameter {key}, which is in none of its groups")
        for kind, value in values.items():
            name = f"{kind}.{matched[key]}"
            if isinstance(value, bool | int | float):
                numbers[name] = type(value).__name__
                tensors[name] = store_number(value)
            elif value is not None:
                tensors[name] = _checked(kind, value)
    kinds = tuple(sorted({name.partition(".")[0] for name in tensors}))
    return OptimizerState(tensors, numbers, kinds, _learning_rate(saved))


def _parts(saved: Any) -> tuple[State, list[ParameterGroup]]:
    """Return states and groups of what `optimizer.state_dict()` returned."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        raise Unmatched("it is not what optimizer.state_dict() returns")
    state, groups = saved["state"], saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in state.values()):
        raise Unmatched("it is not what optimizer.state_dict() returns")
    found = []
    for group in groups:
        names = [str(name) for name in group.get("param_names", ())]
        wrapper = common_prefix(names, WRAPPERS)
        plain = tuple(name.removeprefix(wrapper) for name in names)
        found.append(ParameterGroup(tuple(group.get("params", ())), plain))
    return state, found


def _shape(values: Mapping[str, Any]) -> Shape | None:
    """Return the shape of a parameter: that of all its state but the step count."""
    shapes = set()
    for kind, value in values.items():
        if isinstance(value, StoredTensor) and kind != "step":
            shapes.add(value.shape)
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise Unmatched(f"the state of one parameter has the shapes {shown}")
    return shapes.pop() if shapes else None


def _checked(kind: str, value: Any) -> StoredTensor:
    if not isinstance(value, StoredTensor) or not isinstance(kind, str) or "." in kind:
        raise Unmatched(f"its state {kind} is a {type(value).__name__}, not a tensor or a number")
    return value


def _learning_rate(saved: Any) -> float | None:
    """Return the learning rate of the first group, for people: a run has its own setting."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    first = groups[0] if isinstance(groups, list) and groups else None
    rate = first.get("lr") if isinstance(first, dict) else None
    return float(rate) if isinstance(rate, int | float) else None
