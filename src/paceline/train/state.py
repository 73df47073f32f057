"""All the state of a run, tensor by tensor, under names that do not depend on how it is spread over ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.train.parallel import settled
from paceline.train.sharded_tensor import put, sharded_like, whole
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and buffers as `model.NAME`, optimizer state as `optimizer.KIND.NAME`.

    Of a model in slices, each is sharded as it is; `sharded.whole` makes it what it is without.
    """
    module = settled(model)
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name} of the model's state is a {type(value).__name__}, not a tensor",
                fix="keep such state as a buffer: register_buffer instead of get_extra_state",
            )
        yield f"model.{name}", value.detach()
    names = _names(module, optimizer)
    for parameter, state in optimizer.state.items():
        for kind, value in sorted(state.items()):
            if value is not None:
                yield f"optimizer.{kind}.{names[parameter]}", _as_tensor(value)


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the name of every parameter that the optimizer has; all must be the model's."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    foreign = [
        value for group in optimizer.param_groups for value in group["params"] if value not in names
    ]
    if foreign:
        raise ConfigError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, such as one of shape {list(foreign[0].shape)}",
            fix="make them part of the model that the Trainer is given",
        )
    return names


def _as_tensor(value: Tensor | float) -> Tensor:
    """Return a value as a tensor with all its bits: a Python float has 64."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


_HOW = {
    "params",
    "lr",
    "initial_lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
}  # how, not what, is computed


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what kind of optimizer it is, and its settings, as words that can be compared."""
    facts = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        which = f"optimizer[{number}]" if number else "optimizer"
        facts |= {
            f"{which}.{name}": str(value)
            for name, value in sorted(group.items())
            if name not in _HOW
        }
    return facts


def python_numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, str]:
    """Return which entries of the optimizer's state are Python numbers, with their type: a file holds them as tensors."""
    names = _names(settled(model), optimizer)
    return {
        f"optimizer.{kind}.{names[parameter]}": type(value).__name__
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, int | float)
    }


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Iterable[tuple[str, Tensor]],
    numbers: Mapping[str, str],
) -> list[str]:
    """Put saved tensors where `named_state` found them; return what does not fit. Nothing may be trained if something does not."""
    weights = dict(settled(model).state_dict())
    slots = OptimizerSlots(model, optimizer)
    problems, seen = [], set()
    with torch.no_grad():
        for full_name, value in saved:
            seen.add(full_name)
            part, _, name = full_name.partition(".")
            if part == "model":
                problems += load_weight(weights, name, value)
            else:
                kind, _, name = name.partition(".")
                problems += slots.load(kind, name, value, numbers.get(full_name))
    return problems + [
        f"{name} {_form(value)} was not saved"
        for name, value in weights.items()
        if f"model.{name}" not in seen
    ]


def load_weight(weights: Mapping[str, Tensor], name: str, value: Tensor) -> list[str]:
    """Put one saved weight in its place; return what does not fit."""
    if name not in weights:
        return [f"{name} {_form(value)} is not in this model"]
    if _form(weights[name]) != _form(value):
        return [f"{name} was {_form(value)}, is {_form(weights[name])}"]
    put(weights[name], value)
    return []


class OptimizerSlots:
    """What an optimizer remembers of each parameter."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._state = optimizer.state
        self._parameters = dict(settled(model).named_parameters())
        self._groups = {
            parameter: group for group in optimizer.param_groups for parameter in group["params"]
        }

    def load(self, kind: str, name: str, value: Tensor, number: str | None) -> list[str]:
        """Put one saved value in its slot."""
        parameter = self._parameters.get(name)
        if parameter is None or parameter not in self._groups:
            return [f"the optimizer's {kind} of {name} has no parameter here"]
        group = self._groups[parameter]
        on_host = kind == "step" and not (
            group.get("capturable") or group.get("fused")
        )  # torch's own rule
        kept = value.to("cpu", copy=True) if on_host else sharded_like(parameter, value)
        self._state[parameter][kind] = kept if number is None else _PYTHON[number](kept.item())
        return []


_PYTHON = {"int": int, "float": float, "bool": bool}


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def content(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return (
        value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if value.numel()
        else b""
    )


def digest_of(name: str, value: Tensor) -> str:
    """Return the SHA-256 of one tensor with its name, type and shape."""
    label = f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
    return hashlib.sha256(label + content(value)).hexdigest()


def digests_of_all(world: World, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor that one rank alone holds, of all ranks. Every rank must call this."""
    mine = {name: digest_of(name, value) for name, value in own.items()}
    return {
        name: found
        for text in all_gather_texts(world, json.dumps(mine))
        for name, found in json.loads(text).items()
    }


def state_digest(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, str] | None = None
) -> str:
    """Return one SHA-256 over weights, buffers and optimizer state, and over what `others` are the sums of.

    Every rank must call this if the model is in slices.
    """
    found = {
        name: digest_of(name, whole(value)) for name, value in named_state(model, optimizer)
    } | dict(others or {})
    return hashlib.sha256(
        "".join(digest for _, digest in sorted(found.items())).encode()
    ).hexdigest()
