"""The learning rates of a run: set by `lr.schedule`, by a tracked scheduler, or by the user's code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        self._run_config, self._schedules = config, schedules
        self.by_script: list[tuple[str, str, str]] = []
        """Settings that do not apply, what is so instead, and by what."""
        if not math.isclose(self.now, scaled_lr(config), rel_tol=1e-6):  # it may be a tensor
            self.by_script.append(("lr.base", human_rate(self.now), "the script's optimizer"))
        if schedules:
            self.by_script.append(("lr.schedule", "set", f"the script's {', '.join(schedules)}"))

    @property
    def now(self) -> float:
        """The learning rate of the first parameter group."""
        if self._set_values:
            return self._peaks[0] * self._factor
        if self._is_set_here and self._peaks:  # a restored rate is that of the last step
            return self._peaks[0]
        return float(self._groups[0]["lr"]) if self._groups else 0.0

    def restored(
        self, saved: Mapping[str, Sequence[float]], made: Mapping[str, Sequence[float]]
    ) -> str:
        """Return the sentence about a script whose optimizers now have other rates than those that the run began with.

        `saved` and `made` are the rates of each optimizer when it was registered: at the run's first start, and now. With
        `resume=changed` the script's rates apply from here on, as other changed settings do.
        """
        if not saved:  # nothing was restored, or an imported file
            return ""
        before = [rate for name in made for rate in saved.get(name, made[name])]
        now = [rate for rates in made.values() for rate in rates]
        if before == now:
            return ""
        at = next(
            (at for at, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), 0
        )
        which = f" of parameter group {at}" if at else ""
        text = f"the script's learning rate{which} is {now[at]:g}; it was {before[at]:g} when this run began"
        if self._is_set_here:
            return f"{text}: lr.schedule uses the script's from here on"
        if self._schedules:
            return f"{text}: not used, because the checkpoint has the state of {self._schedules[0]}"
        if self._run_config.resume != "changed":
            return f"{text}: not used, because the checkpoint has a rate. To use it, add resume=changed"
        for group, rate in zip(self._groups, self._peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return f"{text}: used from here on (resume=changed)"

    @property
    def description(self) -> str:
        """The rate of the next step, and who sets it; after a checkpoint was restored, that of the checkpoint."""
        config, text = self._run_config, f"lr {human_rate(self.now)}"
        if self._schedules:
            return f"{text}, set by {', '.join(self._schedules)}"
        if self.now == scaled_lr(config):
            return describe_lr(config)
        if self._peaks and not math.isclose(self.now, self._peaks[0], rel_tol=1e-6):
            return f"{text} from the checkpoint"
        if any(is_given(config, name) for name in _MAKE_THE_RATE):
            text += f" of the script's optimizer, instead of {describe_lr(config)}; to use it: lr=paceline.scaled_lr(config)"
        return text + describe_schedule(config) if self._is_set_here else text

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
