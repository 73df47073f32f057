"""Where programs keep weights, optimizer state, scheduler and step: torch scripts, Lightning, Accelerate, Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.importing.stored_tensor import StoredTensor
from paceline.checkpoint.importing.tree import Other
from paceline.errors import ConfigError, DataError, did_you_mean

# Lower case: the snapshot of PyTorch's DDP tutorial has MODEL_STATE and EPOCHS_RUN.
_WEIGHTS = ("model", "model_state_dict", "state_dict", "model_state", "net", "module", "weights")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizer_state", "optim")
_SCHEDULER = (
    "scheduler", "scheduler_state_dict", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict",
    "scheduler_state", "schedulers", "sched",
)  # fmt: skip
_STEP = ("step", "global_step", "steps", "iteration", "iter_num")
_EPOCHS = ("epochs_run", "finished_epoch")
"""Keys that count complete epochs. A bare `epoch` is the number of the last epoch in one script, of the next in another."""
_LIGHTNING = "pytorch-lightning_version"
_NO_STATE = {_LIGHTNING, "loops", "hparams_name", "hyper_parameters"}
_SAVE = 'use torch.save for {"model": model.state_dict(), "optimizer": optimizer.state_dict()}'


class Contents(NamedTuple):
    """What another program saved."""

    layout: str
    weights: dict[str, StoredTensor]
    optimizers: tuple[Any, ...] = ()
    """What `state_dict()` of each optimizer returned."""
    schedulers: tuple[Any, ...] = ()
    step: int = 0
    step_key: str = ""
    """Where the step was found; empty if the file has none."""
    epochs: int = 0
    """Complete epochs, if the file has these instead of the step; `step_key` says where."""
    ordered: bool = True
    """Whether the weights are in the order of the model's parameters; safetensors files sort them."""
    ignored: tuple[str, ...] = ()
    """Keys or files that nothing was imported from."""
    files: frozenset[str] = frozenset()
    """The files of a folder that hold the weights."""
    left_out: str = ""
    """Why the optimizer state does not belong to the weights."""


def contents_of(loaded: Any, source: Path, key: str = "") -> Contents:
    """Return the parts of a torch.save file: a state dict, or a dict with one, which `key` may name."""
    if not isinstance(loaded, dict) or not loaded:
        raise DataError(f"{source} holds a {_kind(loaded)}, not a state dict", fix=_SAVE)
    loaded = _unnested(loaded)
    usual = _first(_WEIGHTS, loaded, dict)
    weights_key = key or usual
    if weights_key is None:
        if not any(isinstance(value, StoredTensor) for value in loaded.values()):
            raise _no_weights(loaded, source)
        return Contents("state dict", state_dict_of(loaded, source))
    named = _named(loaded, key, source) if key else loaded[weights_key]
    weights = state_dict_of(named, source)
    step_key, epochs_key = _first(_STEP, loaded, int), _first(_EPOCHS, loaded, int)
    optimizer_key = _first(_OPTIMIZER, loaded, dict, list)
    scheduler_key = _first(_SCHEDULER, loaded, dict, list)
    used = {weights_key, weights_key.partition(".")[0], step_key, optimizer_key, scheduler_key}
    used |= _NO_STATE if step_key else {*_NO_STATE, epochs_key}
    left_out = ""
    if key and usual is not None and key != usual:  # such as an EMA beside the model
        left_out = f"it belongs to the weights of {usual}"
    return Contents(
        layout="Lightning checkpoint" if _LIGHTNING in loaded else "torch.save file",
        weights=weights,
        optimizers=_several(loaded, optimizer_key),
        schedulers=_several(loaded, scheduler_key),
        step=max(0, loaded[step_key]) if step_key else 0,
        step_key=step_key or epochs_key or "",
        epochs=max(0, loaded[epochs_key]) if epochs_key and not step_key else 0,
        ignored=tuple(str(name) for name, value in loaded.items() if name not in used and value),
        left_out=left_out,
    )


def _unnested(loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Return the dict with what its only part holds, such as `app` of a converted distributed checkpoint."""
    if _first(_WEIGHTS, loaded, dict) is not None:
        return loaded
    inner = [
        name
        for name, value in loaded.items()
        if type(value) is dict and _first(_WEIGHTS, value, dict) is not None
    ]
    if len(inner) != 1:
        return loaded
    part: dict[Any, Any] = loaded[inner[0]]
    return part | {name: value for name, value in loaded.items() if name != inner[0]}


def _named(loaded: dict[Any, Any], key: str, source: Path) -> Any:
    """Return the value of a key, or of keys joined by dots, such as ema.shadow."""
    if key in loaded:
        return loaded[key]
    value: Any = loaded
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            names = [str(name) for name in loaded]
            raise ConfigError(
                f"--weights {key}: {source} has the keys {', '.join(names[:12])}",
                fix=did_you_mean(key, names),
            )
        value = value[part]
    return value


def _no_weights(loaded: dict[Any, Any], source: Path) -> DataError:
    with_tensors = [
        str(name)
        for name, value in loaded.items()
        if isinstance(value, dict)
        and any(isinstance(item, StoredTensor) for item in value.values())
    ]
    keys = ", ".join(map(str, list(loaded)[:12]))
    choice = f"name the key that holds them: --weights {with_tensors[0]}" if with_tensors else _SAVE
    return DataError(f"{source} has no weights under its keys {keys}", fix=choice)


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


def _several(loaded: Mapping[Any, Any], key: str | None) -> tuple[Any, ...]:
    found = loaded[key] if key else []
    return tuple(found) if isinstance(found, list) else (found,)


def _first(keys: Iterable[str], loaded: Mapping[Any, Any], *kinds: type) -> str | None:
    """Return the first key, in upper or lower case, with a value of one of these types."""
    written = {name.lower(): name for name in loaded if isinstance(name, str)}
    for key in keys:
        if key in written and type(loaded[written[key]]) in kinds:
            return written[key]
    return None


def _kind(value: object) -> str:
    if isinstance(value, StoredTensor):
        return "tensor"
    return value.kind if isinstance(value, Other) else type(value).__name__
