"""The state of model and optimizer as named tensors, and their digests. Names do not depend on parallelism."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.exact.parallel import resharded
from paceline.exact.sharded_tensor import put, sharded_like, whole
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and buffers as `model.NAME`, optimizer state as `optimizer.KIND.NAME` or `optimizer.KIND.[WORD]`.

    Tensors of a sharded model are sharded; `sharded_tensor.whole` returns the unsharded ones.
    """
    module = resharded(model)
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name} in the model's state_dict is a {type(value).__name__}, not a tensor",
                fix="store it as a buffer: register_buffer instead of get_extra_state",
            )
        yield f"model.{name}", value.detach()
    for name, value in _optimizer_state(module, optimizer):
        yield f"optimizer.{name}", _as_tensor(value, name)


def _optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any]]:
    """Yield the values of an optimizer's state as KIND.NAME, or as KIND.[WORD] where a word is the key instead of a parameter."""
    names = _names(module, optimizer)
    for owner, state in optimizer.state.items():
        if isinstance(owner, Tensor):
            name = names[owner]
        elif isinstance(owner, str):
            name = f"[{owner}]"
        else:
            raise ConfigError(
                f"the optimizer keeps its state under a {type(owner).__name__} as key, which a checkpoint cannot hold",
                fix="let the keys of optimizer.state be parameters or words",
            )
        entries = state if isinstance(state, Mapping) else {"": state}  # state["count"] = 3
        for kind, value in sorted(entries.items()):
            if value is not None:
                yield f"{kind}.{name}", value
    yield from _inner_state(names, optimizer)


def _inner_state(
    names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any]]:
    """Yield the state of the optimizers inside of one as ATTRIBUTE>KIND.NAME."""
    for attribute, inner in inner_optimizers(optimizer).items():
        for owner, state in inner.state.items():
            for kind, value in sorted(state.items()) if owner in names else ():
                if value is not None:
                    yield f"{attribute}{_INNER}{kind}.{names[owner]}", value


_INNER = ">"
"""Stands between the attribute of an optimizer that holds another optimizer and a kind of the other's state."""


def inner_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers inside of one, such as the SGD of a SAM, by attribute: often its `state_dict` leaves out their state.

    >>> inner_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    {}
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return {
            name: value
            for name, value in vars(optimizer).items()
            if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state
        }
    inner: dict[str, torch.optim.Optimizer] = getattr(optimizer, "inner", {})
    return inner


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the name of every parameter; raise if the optimizer has parameters of another model."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    foreign = []
    for group in optimizer.param_groups:
        foreign += [value for value in group["params"] if value not in names]
    if foreign:
        raise ConfigError(
            f"the optimizer has {len(foreign)} parameters that are not in the model, such as one of shape {list(foreign[0].shape)}",
            fix="call model = run.model(model) before run.steps, and make the optimizer of that model's parameters; "
            "layers in a Python list belong into nn.ModuleList",
        )
    return names


def _as_tensor(value: Any, name: str) -> Tensor:
    """Return a value of an optimizer's state as a tensor without rounding: a Python float has 64 bits."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, str):
        return torch.tensor(list(value.encode()), dtype=torch.uint8)
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise ConfigError(
        f"the optimizer keeps a {type(value).__name__} in its state as {name}, which a checkpoint cannot hold",
        fix="let the optimizer keep tensors, numbers and strings there; a list of tensors becomes one tensor by torch.stack",
    )


KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose how an optimizer computes, for the devices of this start: they are not restored."""
# The learning rate has settings of its own.
_NOT_COMPARED = KERNELS | {"params", "lr", "initial_lr"}


def group_names() -> Iterator[str]:
    """Yield the names of the parameter groups in facts and messages: optimizer, optimizer[1], optimizer[2], ..."""
    yield "optimizer"
    for number in itertools.count(1):
        yield f"optimizer[{number}]"


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the class of an optimizer and its options as strings that can be compared."""
    facts = {"optimizer": type(optimizer).__name__}
    for which, group in zip(group_names(), optimizer.param_groups, strict=False):
        for name, value in sorted(group.items()):
            if name not in _NOT_COMPARED:
                facts[f"{which}.{name}"] = str(value)
    return facts


def python_numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, str]:
    """Return the type of each optimizer state entry that is a number or a string: files hold them as tensors."""
    types = {}
    for name, value in _optimizer_state(resharded(model), optimizer):
        if isinstance(value, int | float | str):
            types[f"optimizer.{name}"] = type(value).__name__
    return types


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Iterable[tuple[str, Tensor]],
    numbers: Mapping[str, str],
    is_saved: Callable[[str], bool] = lambda _: True,
) -> list[str]:
    """Copy saved tensors into model and optimizer; return a line for each mismatch. After one, do not train.

    `is_saved` tells which weights checkpoints hold; the others keep their values.
    """
    weights = dict(resharded(model).state_dict())
    slots = OptimizerSlots(model, optimizer)
    problems: list[str] = []
    seen = set()
    with torch.no_grad():
        for full_name, value in saved:
            seen.add(full_name)
            part, _, name = full_name.partition(".")
            if part == "model":
                problems += load_weight(weights, name, value)
            else:
                kind, _, name = name.partition(".")
                problems += slots.load(kind, name, value, numbers.get(full_name))
    for name, value in weights.items():
        if f"model.{name}" not in seen and is_saved(name):
            problems.append(f"{name} {_type_and_shape(value)} was not saved")
    return problems


def load_weight(weights: Mapping[str, Tensor], name: str, value: Tensor) -> list[str]:
    """Copy one saved weight; return a line if it does not match."""
    if name not in weights:
        return [f"{name} {_type_and_shape(value)} is not in this model"]
    if _type_and_shape(weights[name]) != _type_and_shape(value):
        return [f"{name} was {_type_and_shape(value)}, is {_type_and_shape(weights[name])}"]
    put(weights[name], value)
    return []


class OptimizerSlots:
    """Restores an optimizer's state of each parameter."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._state: Any = optimizer.state
        self._inner = inner_optimizers(optimizer)
        self._parameters = dict(resharded(model).named_parameters())
        self._groups = {}
        for group in optimizer.param_groups:
            self._groups.update(dict.fromkeys(group["params"], group))

    def load(self, kind: str, name: str, value: Tensor, number: str | None) -> list[str]:
        """Restore one value; return a line if there is no such parameter."""
        parameter = self._parameters.get(name)
        if parameter is None and name.startswith("["):
            self._load_word(kind, name[1:-1], value, number)
            return []
        if parameter is None or parameter not in self._groups:
            return [f"the optimizer has no parameter {name} for the saved {kind}"]
        state = self._state
        if _INNER in kind:
            attribute, _, kind = kind.partition(_INNER)
            if attribute not in self._inner:
                return [f"the optimizer has no other one as {attribute} for the saved {kind}"]
            state = self._inner[attribute].state
        if number is not None:
            state[parameter][kind] = _python_value(number, value)
            return []
        group = self._groups[parameter]
        on_device = group.get("capturable") or group.get("fused")  # torch's own rule
        if kind == "step" and not on_device:
            restored = value.to("cpu", copy=True)
        else:
            restored = sharded_like(parameter, value)
        state[parameter][kind] = restored
        return []

    def _load_word(self, kind: str, word: str, value: Tensor, number: str | None) -> None:
        """Restore a value under a word; a tensor goes to the device of the one that the script has made."""
        now = self._state.get(word, {})
        made = now.get(kind) if isinstance(now, Mapping) else now
        device = made.device if isinstance(made, Tensor) else value.device
        restored = value.to(device, copy=True) if number is None else _python_value(number, value)
        if kind:
            self._state[word] = {**(now if isinstance(now, Mapping) else {}), kind: restored}
        else:
            self._state[word] = restored


def _python_value(kind: str, value: Tensor) -> Any:
    if kind == "str":
        return bytes(value.tolist()).decode()
    return {"int": int, "float": float, "bool": bool}[kind](value.item())


def _type_and_shape(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def content(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    if not value.numel():
        return b""
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_of(name: str, value: Tensor) -> str:
    """Return the SHA-256 of one tensor with its name, type and shape."""
    label = f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
    return hashlib.sha256(label + content(value)).hexdigest()


def digests_of_all(world: World, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of the tensors that only one rank holds, for all ranks. Every rank must call this."""
    own_digests = {name: digest_of(name, value) for name, value in own.items()}
    digests: dict[str, str] = {}
    for text in all_gather_texts(world, json.dumps(own_digests)):
        digests.update(json.loads(text))
    return digests


def state_digest(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, str] | None = None
) -> str:
    """Return one SHA-256 over weights, buffers and optimizer state, and over the digests in `others`.

    Every rank must call this if the model is sharded.
    """
    return digest_of_all(named_state(model, optimizer), others)


def digest_of_all(
    tensors: Iterable[tuple[str, Tensor]], others: Mapping[str, str] | None = None
) -> str:
    """Return one SHA-256 over named tensors and over the digests in `others`.

    Every rank must call this if some are sharded.
    """
    digests = {}
    for name, value in tensors:
        digests[name] = digest_of(name, whole(value))
    digests.update(others or {})
    text = "".join(digest for _, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()
