"""Which updates are alike, so that the CUDA graph of one can replay another: the kinds of updates of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.reading.nest import form_of
from paceline.exact.lanes import UpdateCall
from paceline.exact.script_values import ScriptValues

UpdateKind = tuple[Any, ...]
"""What an update must share with a captured one: optimizer and its options, loss and the numbers that it reads, clipping,
the form of its batch, modes and numbers of the modules."""
_MAX_CHANGES = 16
"""Losses of the same code, such as a lambda in the loop, or changes of a number, after which capturing is given up."""
_MAX_KINDS = 256
_PLAIN = {bool, int, float, type(None)}
_Named = tuple[tuple[str, Any], ...]


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
        self._options: dict[torch.optim.Optimizer, _Options] = {}
        self._seen: Counter[UpdateKind] = Counter()
        self._functions: dict[Any, set[Any]] = {}
        self._read: dict[Any, ScriptValues] = {}
        self._before: dict[Any, _Named] = {}
        """The last options of each optimizer, and the last numbers that each loss has read."""
        self._changed: Counter[str] = Counter()

    def kind_of(self, call: UpdateCall, selections: int, buffers: int) -> UpdateKind:
        """Return the kind of an update; all that a graph reads as a number, not from memory, is part of it."""
        modes = tuple(module.training for module in self._modules)
        numbers = tuple(attributes.get(name) for attributes, name in self._numbers)
        lanes = tuple((lane.samples, form_of(lane.batch)) for lane in call.step.lanes)
        options = self._followed(call.optimizer, self._options_now(call.optimizer))
        values = self._followed(call.loss, self._values_of(call.loss))
        # The function itself, not its id, which another one may get later.
        what = call.optimizer, call.loss, call.clip_norm, call.step.plan.samples
        return (*what, options, values, lanes, selections, buffers, modes, numbers)

    def _options_now(self, optimizer: torch.optim.Optimizer) -> _Named:
        found = self._options.get(optimizer)
        if found is None:
            found = self._options[optimizer] = _Options(optimizer)
        return found.now()

    def _values_of(self, loss: Any) -> _Named:
        """Return the numbers of the script that a loss reads."""
        found = self._read.get(loss)
        if found is None:
            found = self._read[loss] = ScriptValues(loss)
        return found.now()

    def _followed(self, owner: Any, named: _Named) -> _Named:
        """Count which of these values have changed since the last update."""
        before = self._before.setdefault(owner, named)
        if named != before:
            self._before[owner] = named
            is_option = isinstance(owner, torch.optim.Optimizer)
            of = f"of {type(owner).__name__}" if is_option else "that the loss reads"
            self._changed.update({f"{name} {of}" for name, _ in set(before) ^ set(named)})
        return named

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
                    f"the script has changed {name} {changes} times, "
                    "and a CUDA graph repeats the value it was captured with"
                )
        if len(self._seen) > _MAX_KINDS:
            return f"there are more than {_MAX_KINDS} kinds of steps; pad batches to a few lengths"
        return ""


class _Options:
    """The options of an optimizer, compared as objects first: most updates have those of the one before."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._objects: list[Any] = []
        self._tensors: list[Tensor] = []
        self._places: list[int] = []
        self._named: _Named = ()

    def now(self) -> _Named:
        """Return the names and values of all options."""
        objects = [value for group in self._optimizer.param_groups for value in group.values()]
        is_same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        if not is_same or self._places != [value.data_ptr() for value in self._tensors]:
            self._collect(objects)
        return self._named

    def _collect(self, objects: list[Any]) -> None:
        self._named = _options_of(self._optimizer)
        self._tensors = [value for value in objects if isinstance(value, Tensor)]
        self._places = [value.data_ptr() for value in self._tensors]
        options = [
            value
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name != "params" and not isinstance(value, Tensor)
        ]
        self._objects = objects if all(map(_is_fixed, options)) else []


def _is_fixed(value: Any) -> bool:
    """Return whether an object always has the same value.

    >>> _is_fixed((0.9, 0.95)), _is_fixed([0.9]), _is_fixed((torch.tensor(0.9), 0.95))
    (True, False, False)
    """
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return type(value) in _PLAIN or isinstance(value, str)


def _options_of(optimizer: torch.optim.Optimizer) -> _Named:
    """Return all options of all groups; of a tensor, which a graph reads, only where it lies.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> sgd = torch.optim.SGD([weight], lr=0.1)
    >>> before = _options_of(sgd)
    >>> sgd.param_groups[0].update(momentum=0.9, lr=0.2)
    >>> sorted(set(_options_of(sgd)) - set(before))
    [('lr', (0, 0.2)), ('momentum', (0, 0.9))]
    """
    return tuple(
        (name, (number, _fixed(value)))
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    )


def _fixed(value: Any) -> Any:
    """Return what an option is to a graph: where a tensor lies, other values themselves.

    >>> _fixed((0.9, [1, 2]))
    (0.9, '[1, 2]')
    """
    if type(value) in _PLAIN:  # most are
        return value
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):  # betas may be tensors
        return tuple(map(_fixed, value))
    return value if isinstance(value, Hashable) else repr(value)
