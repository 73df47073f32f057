"""Which updates are alike, so that the CUDA graph of one can replay another: the kinds of updates of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.reading.nest import form_of
from paceline.train.step.updates import UpdateCall

UpdateKind = tuple[Any, ...]
"""What an update must share with a captured one: optimizer and its options, loss, clipping, the form of its batch, modes and
numbers of the modules."""
_MAX_CHANGES = 16
"""Losses of the same code, such as a lambda in the loop, or options of an optimizer, after which capturing is given up."""
_MAX_KINDS = 256
_Options = tuple[tuple[tuple[str, Any], ...], ...]


class UpdateKinds:
    """Counts the updates of each kind."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._numbers = [
            (vars(module), name)
            for module in modules
            for name, value in vars(module).items()
            if type(value) is float  # such as a dropout's p, a momentum, a temperature
        ]
        self._seen: Counter[UpdateKind] = Counter()
        self._functions: dict[Any, set[Any]] = {}
        self._options: dict[torch.optim.Optimizer, _Options] = {}
        self._changed: Counter[str] = Counter()

    def kind_of(self, call: UpdateCall, selections: int, buffers: int) -> UpdateKind:
        """Return the kind of an update; all that a graph reads as a number, not from memory, is part of it."""
        modes = tuple(module.training for module in self._modules)
        numbers = tuple(attributes.get(name) for attributes, name in self._numbers)
        lanes = tuple((lane.samples, form_of(lane.batch)) for lane in call.step.lanes)
        options = _options_of(call.optimizer)
        before = self._options.setdefault(call.optimizer, options)
        if options != before:
            self._options[call.optimizer] = options
            self._changed.update(_names_of_changes(before, options))
        # The function itself, not its id, which another one may get later.
        what = call.optimizer, call.loss, call.clip_norm, call.step.plan.samples
        return (*what, options, lanes, selections, buffers, modes, numbers)

    def count(self, call: UpdateCall, kind: UpdateKind) -> None:
        """Count updates of this kind, and functions of the same code."""
        self._seen[kind] += 1
        code = getattr(call.loss, "__code__", None)
        if code is not None:
            self._functions.setdefault(code, set()).add(call.loss)

    def seen(self, kind: UpdateKind) -> int:
        """Return how many updates of this kind there were."""
        return self._seen[kind]

    def too_many(self, call: UpdateCall) -> str:
        """Return why most updates are of a kind of their own; "" if they are not."""
        functions = self._functions.get(getattr(call.loss, "__code__", None), ())
        if len(functions) > _MAX_CHANGES:
            return "the loss is a new function in every step; define it before the loop"
        for name, changes in self._changed.items():
            if changes > _MAX_CHANGES:
                return (
                    f"the script has changed {name} of {type(call.optimizer).__name__} {changes} times, "
                    "and a CUDA graph repeats the value it was captured with"
                )
        if len(self._seen) > _MAX_KINDS:
            return f"there are more than {_MAX_KINDS} kinds of steps; pad batches to a few lengths"
        return ""


def _options_of(optimizer: torch.optim.Optimizer) -> _Options:
    """Return all options; of a tensor, which a graph reads, only where it lies.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> sgd = torch.optim.SGD([weight], lr=0.1)
    >>> before = _options_of(sgd)
    >>> sgd.param_groups[0].update(momentum=0.9, lr=0.2)
    >>> sorted(_names_of_changes(before, _options_of(sgd)))
    ['lr', 'momentum']
    """
    return tuple(
        tuple((name, _fixed(value)) for name, value in group.items() if name != "params")
        for group in optimizer.param_groups
    )


def _fixed(value: Any) -> Any:
    """Return what an option is to a graph: where a tensor lies, other values themselves.

    >>> _fixed((0.9, [1, 2]))
    (0.9, '[1, 2]')
    """
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):  # betas may be tensors
        return tuple(map(_fixed, value))
    return value if isinstance(value, Hashable) else repr(value)


def _names_of_changes(before: _Options, now: _Options) -> Iterator[str]:
    for old, new in zip(before, now, strict=False):
        yield from {name for name, _ in set(old) ^ set(new)}
