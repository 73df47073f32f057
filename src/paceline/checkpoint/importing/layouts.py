"""Where programs keep weights, optimizer state and step: torch scripts, Lightning, Accelerate, Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.importing.stored_tensor import StoredTensor
from paceline.checkpoint.importing.tree import Other
from paceline.errors import DataError

_WEIGHTS = ("model", "model_state_dict", "state_dict", "model_state", "net", "module", "weights")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizer_state", "optim")
_STEP = ("step", "global_step", "steps", "iteration", "iter_num")
_LIGHTNING = "pytorch-lightning_version"
_SAVE = 'use torch.save for {"model": model.state_dict(), "optimizer": optimizer.state_dict()}'


class Contents(NamedTuple):
    """What another program saved."""

    layout: str
    weights: dict[str, StoredTensor]
    optimizers: tuple[Any, ...] = ()
    """What `state_dict()` of each optimizer returned."""
    step: int = 0
    step_key: str = ""
    """Where the step was found; empty if the file has none."""
    ordered: bool = True
    """Whether the weights are in the order of the model's parameters; safetensors files sort them."""


def contents_of(loaded: Any, source: Path) -> Contents:
    """Return the parts of a torch.save file: a state dict, or a dict with one."""
    if not isinstance(loaded, dict) or not loaded:
        raise DataError(f"{source} holds a {_kind(loaded)}, not a state dict", fix=_SAVE)
    key = _first(_WEIGHTS, loaded, dict)
    if key is None:
        if not any(isinstance(value, StoredTensor) for value in loaded.values()):
            keys = ", ".join(map(str, list(loaded)[:12]))
            raise DataError(f"{source} has no weights under its keys {keys}", fix=_SAVE)
        return Contents("state dict", state_dict_of(loaded, source))
    weights = state_dict_of(loaded[key], source)
    step_key = _first(_STEP, loaded, int)
    step = max(0, loaded[step_key]) if step_key else 0
    layout = "Lightning checkpoint" if _LIGHTNING in loaded else "torch.save file"
    return Contents(layout, weights, _optimizers(loaded), step, step_key or "")


def state_dict_of(loaded: Any, source: Path) -> dict[str, StoredTensor]:
    """Return a state dict; raise if it holds anything but tensors."""
    if not isinstance(loaded, dict) or not loaded:
        raise DataError(f"{source} has no weights, but a {_kind(loaded)}", fix=_SAVE)
    for name, value in loaded.items():
        if not isinstance(value, StoredTensor) or not isinstance(name, str):
            raise DataError(
                f"{name} in the state dict of {source} is a {_kind(value)}, not a tensor",
                fix="remove it, and save the file again",
            )
    return dict(loaded)


def _optimizers(loaded: Mapping[Any, Any]) -> tuple[Any, ...]:
    key = _first(_OPTIMIZER, loaded, dict) or _first(_OPTIMIZER, loaded, list)
    found = loaded[key] if key else []
    return tuple(found) if isinstance(found, list) else (found,)


def _first(keys: Iterable[str], loaded: Mapping[Any, Any], kind: type) -> str | None:
    """Return the first key with a value of this type."""
    for key in keys:
        if type(loaded.get(key)) is kind:
            return key
    return None


def _kind(value: object) -> str:
    if isinstance(value, StoredTensor):
        return "tensor"
    return value.kind if isinstance(value, Other) else type(value).__name__
