"""The learning rates of a run: set by `lr.schedule`, by a tracked scheduler, or by the user's code."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from paceline.config import RunConfig
from paceline.config.given import is_given
from paceline.errors import ConfigError
from paceline.scale.lr import describe_lr, describe_schedule, human_rate, scaled_lr, schedule_factor
from paceline.train.saving.run_state import Registered

_MAKE_THE_RATE = ("lr.base", "lr.rule", "lr.reference_batch")


class Rates:
    """The learning rates: set by `lr.schedule`, by a tracked scheduler, or left to the user's code."""

    def __init__(self, config: RunConfig, parts: Registered, total_samples: int) -> None:
        self._config, self._total = config.lr, total_samples
        self._groups = []
        for optimizer in parts.optimizers.values():
            self._groups += optimizer.param_groups
        self._peaks = [float(group["lr"]) for group in self._groups]
        self._set_values: list[Any] = []
        """What `set` wrote last, to find changes by the user's code."""
        self._factor = math.nan
        self.least = 0.0
        """The smallest rate that the optimizers accept."""
        schedules = [type(item).__name__ for item in parts.tracked.schedulers]
        is_constant = config.lr.schedule == "constant" and not config.lr.warmup_samples
        self._is_set_here = not schedules and not is_constant
        if schedules and not is_constant:
            raise ConfigError(
                f"lr.schedule={config.lr.schedule} and the tracked {schedules[0]} both set the learning rate",
                fix="set lr.schedule=constant lr.warmup_samples=0, or do not track a scheduler",
            )
        self.description = f"lr {human_rate(self.now)}"
        self.by_script: list[tuple[str, str, str]] = []
        """Settings that do not apply, what is so instead, and by what."""
        if not math.isclose(self.now, scaled_lr(config), rel_tol=1e-6):  # it may be a tensor
            self.by_script.append(("lr.base", human_rate(self.now), "the script's optimizer"))
        if schedules:
            self.by_script.append(("lr.schedule", "set", f"the script's {', '.join(schedules)}"))
            self.description += f", set by {', '.join(schedules)}"
        elif self.now == scaled_lr(config):
            self.description = describe_lr(config)
        else:
            if any(is_given(config, name) for name in _MAKE_THE_RATE):
                self.description += f" of the script's optimizer, instead of {describe_lr(config)}; to use it: lr=paceline.scaled_lr(config)"
            if self._is_set_here:
                self.description += describe_schedule(config)

    @property
    def now(self) -> float:
        """The learning rate of the first parameter group."""
        if self._set_values:
            return self._peaks[0] * self._factor
        return float(self._groups[0]["lr"]) if self._groups else 0.0

    def set(self, seen: int) -> None:
        """Set the rates for the step that ends after `seen` samples, unless the user's code does."""
        if not self._is_set_here:
            return
        self._refuse_changed()
        factor = schedule_factor(self._config, seen, self._total)
        if factor == self._factor:
            return
        self._factor = factor
        for group, peak in zip(self._groups, self._peaks, strict=True):
            rate = max(peak * factor, self.least)
            if isinstance(group["lr"], Tensor):  # on the device, where a CUDA graph reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._set_values = [_seen(group["lr"]) for group in self._groups]

    def _refuse_changed(self) -> None:
        now = [_seen(group["lr"]) for group in self._groups]
        if self._set_values and now != self._set_values:
            raise ConfigError(
                f"the script set the learning rate to {float(self._groups[0]['lr']):g}, "
                f"but lr.schedule={self._config.schedule} sets it, too",
                fix="set lr.schedule=constant lr.warmup_samples=0 to leave it to the script",
            )


def _seen(rate: Any) -> Any:
    """Return what tells whether a rate was changed, without waiting for the device."""
    return (id(rate), rate._version) if isinstance(rate, Tensor) else rate  # noqa: SLF001 - torch's count of writes
