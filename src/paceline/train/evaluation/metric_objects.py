"""Metric objects (torchmetrics, or any with update, compute and reset): the same result in every world.

Each rank keeps the arguments of its own batches. At the end every rank updates the metrics with all batches, in
dataset order, as one process would.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.data.reading.nest import map_leaves, to_device
from paceline.errors import ConfigError
from paceline.train.saving.tracked import decode, encode
from paceline.world.collectives import broadcast_bytes
from paceline.world.world import World

_CALLS = "calls"


@runtime_checkable
class Metric(Protocol):
    """What torchmetrics calls a metric."""

    def update(self, *arguments: Any, **named: Any) -> Any:
        """Add a batch."""

    def compute(self) -> Any:
        """Return the result of all batches."""

    def reset(self) -> Any:
        """Forget all batches."""


class MetricObjects:
    """The metric objects of one evaluation, and what this rank will update them with."""

    def __init__(self, metrics: Mapping[str, Any], world: World) -> None:
        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                raise ConfigError(
                    f"metrics[{name!r}] is a {type(metric).__name__}, which lacks update, compute or reset",
                    fix="pass a torchmetrics object, and return plain numbers from the score itself",
                )
        self._metrics, self._world = dict(metrics), world
        self._calls: list[dict[str, Any]] = []

    def take(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the arguments of the metrics for this batch; return the other values of the score."""
        missing = [name for name in self._metrics if name not in found]
        if missing:
            raise ConfigError(
                f"metrics= has {missing[0]!r}, but the function of run.evaluate returned {', '.join(found)}",
                fix=f'return the arguments of its update, too: {{"{missing[0]}": (preds, target)}}',
            )
        if self._metrics:
            self._calls.append({name: _copied(found[name]) for name in self._metrics})
        return {name: value for name, value in found.items() if name not in self._metrics}

    def compute(self) -> dict[str, float]:
        """Return the results over all batches of all ranks. Every rank must call this."""
        if not self._metrics:
            return {}
        if self._world.device != "cpu":
            torch.cuda.synchronize(self._world.device)  # the copies of `take`
        for metric in self._metrics.values():
            metric.reset()
            if isinstance(metric, torch.nn.Module):
                metric.to(self._world.device)
        for call in self._all_calls():
            for name, arguments in call.items():
                _update(self._metrics[name], to_device(arguments, self._world.device))
        found: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with _without_own_sync(metric):
                found |= named_numbers(name, metric.compute())
        return found

    def _all_calls(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of every batch in dataset order: ranks have consecutive batches."""
        if self._world.size == 1:
            yield from self._calls
            return
        own = _packed(self._calls)
        for rank in range(self._world.size):
            yield from _unpacked(broadcast_bytes(self._world, own, rank))


def _copied(arguments: Any) -> Any:
    """Start to copy tensors to the host: a whole dataset of predictions may not fit into GPU memory."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_cuda:
            return leaf.detach().to("cpu", non_blocking=True)
        return leaf.detach().clone()

    return map_leaves(copy, arguments)


def _packed(calls: list[dict[str, Any]]) -> bytes:
    tensors: dict[str, Tensor] = {}
    try:
        tree = [encode(call, tensors, f"{number}") for number, call in enumerate(calls)]
    except ConfigError as error:
        raise ConfigError(
            f"the arguments of a metric cannot be sent to other ranks: {error.problem}",
            fix="return tensors, numbers, strings, and lists, tuples or dicts of them",
        ) from error
    parts = {name: value.contiguous() for name, value in tensors.items()}
    parts[_CALLS] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    packed: bytes = save(parts)
    return packed


def _unpacked(content: bytes) -> list[dict[str, Any]]:
    tensors = load(content)
    tree = json.loads(bytes(tensors.pop(_CALLS).numpy()))
    return [decode(call, tensors) for call in tree]


def _update(metric: Metric, arguments: Any) -> None:
    if isinstance(arguments, tuple):
        metric.update(*arguments)
    elif isinstance(arguments, dict):
        metric.update(**arguments)
    else:
        metric.update(arguments)


@contextlib.contextmanager
def _without_own_sync(metric: Any) -> Iterator[None]:
    """Keep torchmetrics from adding the states of all ranks: each has the whole dataset."""
    parts = metric.modules() if isinstance(metric, torch.nn.Module) else [metric]
    found = [(part, part.distributed_available_fn) for part in parts if _syncs(part)]
    for part, _ in found:
        part.distributed_available_fn = _never
    try:
        yield
    finally:
        for part, before in found:
            part.distributed_available_fn = before


def _syncs(part: Any) -> bool:
    return hasattr(part, "distributed_available_fn")


def _never() -> bool:
    return False


def named_numbers(name: str, value: Any) -> dict[str, float]:
    """Return the result of a metric as numbers with names.

    >>> named_numbers("f1", torch.tensor(0.5)), named_numbers("f1", torch.tensor([0.5, 1.0]))
    ({'f1': 0.5}, {'f1/0': 0.5, 'f1/1': 1.0})
    >>> named_numbers("all", {"f1": torch.tensor(0.5), "count": 3})
    {'all/f1': 0.5, 'all/count': 3.0}
    """
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.ndim):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {name: float(value)}
    found: dict[str, float] = {}
    for key, item in items:
        found |= named_numbers(f"{name}/{key}", item)
    return found
