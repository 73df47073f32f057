"""State that a script keeps beside the run: schedulers, averages of the weights, numbers. It finds what no checkpoint holds.

Only variables are searched: of the functions that called `run.steps`, of their modules and of `__main__`, with one level
of attributes, items and keys below them. A resumed run builds these objects anew, so their state would be lost.
"""

from __future__ import annotations

import inspect
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel

from paceline.errors import ConfigError
from paceline.train.saving.run_state import Registered

SCHEDULERS = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
GENERATORS = np.random.Generator | np.random.RandomState | random.Random | torch.Generator
_MOST_ITEMS = 64
"""Items of a list or dict, and attributes of an object, that are searched."""
_SAMPLED_TENSORS, _SAMPLED_NUMBERS = 8, 32
"""How many tensors of an object are looked at for changes, and numbers of each."""
_OF_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = {"torch", "torchdata", "paceline"}
_DEPTH = 3
"""Levels of attributes and items below a tracked object that belong to its state."""


class Variable(NamedTuple):
    """An object that a script can reach by a name."""

    name: str
    value: Any

    @property
    def word(self) -> str:
        """The name as a keyword of `run.track`.

        >>> Variable("self.schedulers[0]", None).word
        'schedulers_0'
        """
        last = self.name.removeprefix("self.")
        return "".join(letter if letter.isalnum() else "_" for letter in last).strip("_")


def variables_of(
    frame: FrameType | None, others: Mapping[str, Any] | None = None
) -> Iterator[Variable]:
    """Yield the variables of the calling functions outside of Paceline, of their modules and of `__main__`, and `others`."""
    spaces: list[Mapping[str, Any]] = []
    is_first = True
    while frame is not None:
        if not _is_own(frame.f_globals.get("__name__")):
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function
                spaces.append(dict(frame.f_locals))
                if sys.version_info < (3, 13):
                    frame.f_locals.clear()  # this copy would keep alive what the script deletes later
            if is_first:
                spaces.append(dict(frame.f_globals))
            is_first = False
        frame = frame.f_back
    spaces += [dict(vars(sys.modules["__main__"])), others or {}]
    seen: set[int] = set()
    for space in spaces:
        for name, value in space.items():
            if not name.startswith("__") and not isinstance(value, ModuleType | type):
                yield from _with_items(name, value, seen)


def _with_items(name: str, value: Any, seen: set[int]) -> Iterator[Variable]:
    """Yield a value and what is one level below it, each object once, under its shortest name."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield Variable(name, value)
    if isinstance(value, dict):
        items = [(f"{name}[{key!r}]", each) for key, each in list(value.items())[:_MOST_ITEMS]]
    elif isinstance(value, list | tuple):
        items = [(f"{name}[{at}]", each) for at, each in enumerate(value[:_MOST_ITEMS])]
    elif isinstance(value, FunctionType | MethodType | Tensor) or _is_own(type(value).__module__):
        return
    else:
        items = [(f"{name}.{key}", each) for key, each in _attributes(value).items()]
    for below, each in items:
        if id(each) not in seen:
            seen.add(id(each))
            yield Variable(below, each)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        found = vars(value)
    except TypeError:
        return {}
    if isinstance(value, nn.Module):  # without torch's own tables of parameters, buffers and hooks
        found = {key: each for key, each in found.items() if key not in _OF_MODULES}
    return dict(list(found.items())[:_MOST_ITEMS])


def _is_own(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "paceline"


class ScriptState:
    """Finds what the script keeps beside the run and no checkpoint holds."""

    def __init__(self, parts: Registered, callbacks: Iterable[object] = ()) -> None:
        self._parts = parts
        self._callbacks = {f"callbacks[{at}]": each for at, each in enumerate(callbacks)}
        self._derived: list[Any] = []
        self._watched: dict[str, _Watched] = {}

    def derive(self, objects: Iterable[Any]) -> None:
        """Accept objects that the script sets anew from the step."""
        self._derived += objects

    def refuse_untracked(self, frame: FrameType | None) -> None:
        """Raise if the script has a scheduler, an averaged model or a gradient scaler that the run does not track."""
        known = self._known()
        optimizers = self._parts.optimizers.values()
        scheduled = {id(value.optimizer) for value in known.values() if _is_scheduler(value)}
        for variable in variables_of(frame, self._callbacks):
            name, value = variable
            if id(value) in known:
                continue
            if _schedules(value, optimizers) or isinstance(value, AveragedModel):
                raise _untracked(variable, f"run.track({variable.word}={name})")
            if _is_scaler(value):
                raise _untracked(
                    variable,
                    "remove it, because with precision=fp16 the run scales gradients itself; or keep it by "
                    f"run.track({variable.word}={name})",
                )
        for key, optimizer in self._parts.optimizers.items():
            is_marked = hasattr(
                optimizer.step, "_wrapped_by_lr_sched"
            )  # torch's own, by every LRScheduler
            if is_marked and id(optimizer) not in scheduled and id(optimizer) not in known:
                raise ConfigError(
                    f"a learning rate scheduler was made for {key} ({type(optimizer).__name__}), but the run tracks none: "
                    "a resumed run would begin its schedule again",
                    fix="call run.track(scheduler=scheduler) before run.steps(...); or, if the script sets the rate from "
                    "step.index alone, run.untracked(optimizer)",
                )

    def watch(self, frame: FrameType | None) -> None:
        """Remember the weights of copies of models, and the states of other objects, that the run does not know."""
        known = self._known()
        own = {id(value) for model in self._parts.models.values() for value in _tensors_of(model)}
        for item in self._parts.tracked.objects.values():
            own |= {id(value) for value in _tensors_of(item)}
        for name, value in variables_of(frame, self._callbacks):
            if id(value) in known or not _may_hold_state(value):
                continue
            watched = _Watched(value, own)
            if watched.before is not None:
                self._watched[name] = watched

    def changed(self, steps: int) -> list[Variable]:
        """Return the watched objects that have changed, each once; only after 1, 2, 4, 8, ... steps of this start."""
        if steps & (steps - 1):
            return []
        derived = {id(each) for each in self._derived}
        names = [name for name, each in self._watched.items() if each.has_changed()]
        found = [Variable(name, self._watched.pop(name).get()) for name in names]
        return [each for each in found if id(each.value) not in derived]

    def _known(self) -> dict[int, Any]:
        """Return what checkpoints hold or need not hold, with what lies inside of tracked objects."""
        found: dict[int, Any] = {}
        for item in (*self._parts.tracked.objects.values(), *self._derived):
            _add_inner(item, found, _DEPTH)
        for model in self._parts.models.values():
            found.update({id(module): module for module in model.modules()})
        return found


class _Watched:
    """An object that may change in the loop: a sample of its numbers at the beginning."""

    def __init__(self, value: Any, own: set[int]) -> None:
        self._own = own
        try:  # what the script deletes shall not stay in memory
            self.get: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # lists and dicts
            self.get = lambda: value
        self.before = self._sample()

    def has_changed(self) -> bool:
        now = self._sample()
        return now is not None and now != self.before

    def _sample(self) -> bytes | None:
        """Return some numbers of some tensors, and the plain values of a state_dict; None where there are none."""
        value = self.get()
        if isinstance(value, GENERATORS):
            return _state_of_generator(value)
        tensors = [each for each in _tensors_of(value) if id(each) not in self._own]
        parts = [repr(_plain_state(value)).encode()] if not isinstance(value, nn.Module) else []
        if not tensors and parts in ([], [b"None"]):
            return None
        for each in tensors[:: max(1, len(tensors) // _SAMPLED_TENSORS)]:
            numbers = each.detach().flatten()[:_SAMPLED_NUMBERS]
            parts.append(repr(numbers.tolist()).encode())
        return b"".join(parts)


def _state_of_generator(value: Any) -> bytes:
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    return repr(value.get_state()).encode()


def _may_hold_state(value: Any) -> bool:
    """Return whether a value is a module, a list or dict of tensors, or an object with a state_dict."""
    if isinstance(value, nn.Module | GENERATORS):
        return True
    if isinstance(value, list | tuple | dict):
        return bool(_tensors_of(value))
    kind = type(value)
    if isinstance(value, Optimizer | type) or kind.__module__.partition(".")[0] in _LIBRARIES:
        return False
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


def _tensors_of(value: Any) -> list[Tensor]:
    """Return the weights and buffers of a module, or the tensors of a list or dict of nothing else, or of a state_dict."""
    if isinstance(value, nn.Module):
        found: list[Any] = [*value.parameters(), *value.buffers()]
    elif isinstance(value, list | tuple):
        found = list(value)
    elif isinstance(value, dict):
        found = list(value.values())
    else:
        state = _state_of(value)
        return [each for each in state.values() if _is_plain_tensor(each)]
    return found if all(_is_plain_tensor(each) for each in found) else []


def _is_plain_tensor(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and type(value) in {Tensor, nn.Parameter}
    return is_plain and not value.is_meta and value.layout == torch.strided


def _plain_state(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return None
    return {
        key: each
        for key, each in _state_of(value).items()
        if isinstance(each, bool | int | float | str)
    } or None


def _state_of(value: Any) -> Mapping[str, Any]:
    try:
        state = value.state_dict()
    except Exception:  # noqa: BLE001 - code of the script, which need not be ready
        return {}
    return state if isinstance(state, dict) else {}


def _untracked(variable: Variable, fix: str) -> ConfigError:
    kind = type(variable.value).__name__
    return ConfigError(
        f"{variable.name} ({kind}) is not tracked: a resumed run would begin with a new one",
        fix=f"call {fix} before run.steps(...); or, if its state follows from step.index alone, run.untracked({variable.name})",
    )


def _add_inner(value: Any, found: dict[int, Any], depth: int) -> None:
    """Add an object and what it holds: SequentialLR has schedulers of its own, a class of the script may have any."""
    if id(value) in found or isinstance(value, int | float | str | Tensor | ModuleType | type):
        return
    found[id(value)] = value
    if depth == 0 or isinstance(value, Optimizer):
        return
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, nn.Module):
        inner = [*value.modules()]
    else:
        inner = [each for key, each in _attributes(value).items() if key != "optimizer"]
    for each in list(inner):
        _add_inner(each, found, depth - 1)


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, SCHEDULERS) and hasattr(value, "optimizer")


def _schedules(value: Any, optimizers: Iterable[Optimizer]) -> bool:
    """Return whether an object sets the rates of one of these optimizers: torch's schedulers, and what is built like one."""
    if isinstance(value, Optimizer | nn.Module | type):
        return False
    if not isinstance(value, SCHEDULERS):
        methods = ("step", "state_dict", "load_state_dict")
        if not all(callable(getattr(type(value), name, None)) for name in methods):
            return False
    mine = _attributes(value).get("optimizer")
    return any(mine is each for each in optimizers)


def _is_scaler(value: Any) -> bool:
    return isinstance(value, torch.amp.GradScaler) and value.is_enabled()
