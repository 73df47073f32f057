"""Whether the script trains by the run: it must not step an optimizer by itself, unless it called `run.backward`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError

_STEPS_TO_WAIT = 20
"""Steps without an update, or an epoch if it is shorter, after which that is reported."""


class ScriptSteps:
    """Refuses calls of `optimizer.step()` that would train each rank alone, or apply the same gradients twice."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._after: dict[int, str] = {}
        """The call that computed the gradients of an optimizer last."""
        self._idle = 0
        self._handle: RemovableHandle | None = None

    @property
    def trains(self) -> bool:
        """Whether the run has computed any gradients."""
        return bool(self._after)

    def watch(self, after: str = "", of: Optimizer | None = None) -> None:
        """Look at every step of an optimizer from now on, after this call computed the gradients of one."""
        if of is not None:
            self._after[id(of)] = after
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._check)

    def ignore(self) -> None:
        """Look no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def is_idle_for_long(self, *, ends_epoch: bool) -> bool:
        """Return, after every step, whether none has trained until now; only once."""
        self._idle += 1
        is_due = self._idle == _STEPS_TO_WAIT or (ends_epoch and self._idle < _STEPS_TO_WAIT)
        self._idle += _STEPS_TO_WAIT if is_due else 0
        return is_due and not self.trains

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = self._after.get(id(optimizer), "")
        if call == "run.backward" or all(optimizer is not each for each in self._optimizers):
            return
        if call == "run.update":
            raise ConfigError(
                "the script called optimizer.step() after run.update, which has called it already: the same gradients "
                "would be applied twice",
                fix="remove optimizer.step() from the loop",
            )
        raise ConfigError(
            "the script called optimizer.step() without run.update: each rank would train alone",
            fix="replace zero_grad(), backward() and step() by run.update(optimizer, loss, step), where loss(batch) "
            "returns the loss; or call run.backward(optimizer, loss, step) before optimizer.step()",
        )
