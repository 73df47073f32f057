"""Settings of local SGD (DiLoCo)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from paceline.config.checks import at_least
from paceline.errors import ConfigError


@dataclass(frozen=True)
class LocalSgdConfig:
    """Local SGD (DiLoCo): replicas train independently and synchronize every `local_sgd.steps` steps."""

    steps: int = 0
    """Steps between two synchronizations (also at the end of each epoch); 0 disables local SGD."""
    replicas: int = 4
    """Replicas that train independently, each on an equal share of the lanes; also the largest number of ranks."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer. 0.7 with momentum 0.9 suits hundreds of steps and long runs; 1 with momentum 0 averages the replicas."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer optimizer; 0 disables it."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        at_least(0, "local_sgd.steps", self.steps)
        at_least(1, "local_sgd.replicas", self.replicas)
        if not self.steps:
            self._refuse_settings_without_steps()
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(
                f"local_sgd.outer_lr must be above 0, got {self.outer_lr}",
                fix="set local_sgd.outer_lr=0.7",
            )
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"local_sgd.outer_momentum must be in [0, 1), got {self.outer_momentum}",
                fix="set local_sgd.outer_momentum=0.9",
            )

    def _refuse_settings_without_steps(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                raise ConfigError(
                    f"local_sgd.{item.name}={value} has no effect without local_sgd.steps",
                    fix="add local_sgd.steps=32",
                )
