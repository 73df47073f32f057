"""Whether the script trains by the run: it must not step an optimizer or change gradients itself, unless it called `run.backward`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError

_STEPS_TO_WAIT = 20
"""Steps without an update, or an epoch if it is shorter, after which that is reported."""


_UPDATES_TO_COMPARE = 16
"""Updates whose gradients are all compared; later the first one only, which every clipping of a model changes, too."""


class ScriptSteps:
    """Refuses calls of `optimizer.step()` that would train each rank alone, or apply the same gradients twice."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._after: dict[int, str] = {}
        """The call that computed the gradients of an optimizer last."""
        self._updates = 0
        self._used: list[tuple[Tensor, Tensor, int]] = []
        """Parameters, the gradients that the last update has used, and how often these had been written."""
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
            self._remember_gradients(of if after == "run.update" else None)
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

    def _remember_gradients(self, optimizer: Optimizer | None) -> None:
        self._used = []
        self._updates += 1
        for group in optimizer.param_groups if optimizer is not None else ():
            for value in group["params"]:
                if value.grad is not None:
                    self._used.append((value, value.grad, value.grad._version))  # noqa: SLF001 - torch's count of writes
                    if self._updates > _UPDATES_TO_COMPARE:
                        return

    def refuse_changed_gradients(self) -> None:
        """Raise if the script has changed gradients since the last update used them: that has no effect."""
        for value, gradient, version in self._used:
            if value.grad is not gradient or gradient._version == version:  # noqa: SLF001
                continue
            if bool(
                gradient.any()
            ):  # those of zero_grad(set_to_none=False) are 0, and harm nothing
                raise ConfigError(
                    "the script changed the gradients after run.update, which has used them already: clip_grad_norm_, "
                    "clip_grad_value_ or backward() have no effect there",
                    fix="clip by run.update(..., clip=1.0); or call run.backward(optimizer, loss, step), change the "
                    "gradients, then optimizer.step(). To read their norm, call torch.nn.utils.get_total_norm",
                )
        self._used = []

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
