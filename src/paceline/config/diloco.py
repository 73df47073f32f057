"""How replicas of a model walk apart for some steps, and what that cannot be combined with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from paceline.config.checks import at_least
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config.schema import RunConfig


@dataclass(frozen=True)
class LocalSgdConfig:
    """Steps that replicas take apart, so that ranks have less to tell each other."""

    steps: int = 0
    """Steps that replicas take apart before they meet; at the end of an epoch they meet as well. 0: gradients are summed in every step."""
    replicas: int = 4
    """Copies of the model that walk apart, each on its share of the lanes; also the largest number of ranks."""
    outer_lr: float = 0.7
    """Rate of the outer optimizer. 0.7 with momentum 0.9 is for hundreds of steps and long runs; 1 with 0 is the mean of the replicas."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer optimizer; 0: none."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        at_least(0, "local_sgd.steps", self.steps)
        at_least(1, "local_sgd.replicas", self.replicas)
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if given and not self.steps:
            raise ConfigError(
                f"local_sgd.{given[0]}={getattr(self, given[0])} does nothing without local_sgd.steps",
                fix="add local_sgd.steps=32",
            )
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(
                f"local_sgd.outer_lr={self.outer_lr} leads nowhere",
                fix="set local_sgd.outer_lr to a number above 0, such as 0.7",
            )
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"local_sgd.outer_momentum={self.outer_momentum} never settles",
                fix="set local_sgd.outer_momentum to a number from 0 to below 1, such as 0.9",
            )


def check_local_sgd(config: RunConfig) -> None:
    """Refuse what replicas that walk apart cannot do."""
    lanes, replicas = config.batch.lanes, config.local_sgd.replicas
    if lanes % replicas:
        raise ConfigError(
            f"{replicas} replicas cannot share {lanes} lanes evenly",
            fix=f"set local_sgd.replicas to one of {_divisors(lanes)}, or batch.lanes to a multiple of {replicas}",
        )
    if config.parallel == "fsdp":
        raise ConfigError(
            "local_sgd.steps keeps whole replicas, and parallel=fsdp slices",
            fix="set parallel=ddp, or local_sgd.steps=0",
        )
    if config.capture == "true":
        raise ConfigError(
            "steps of replicas that take turns cannot be captured",
            fix="set capture=false, or local_sgd.steps=0",
        )
    if config.compression == "powersgd":
        raise ConfigError(
            "compression=powersgd is for gradients, and local_sgd.steps sends differences of weights",
            fix="set compression=bf16 or none",
        )
    if config.precision not in {"fp32", "tf32", "bf16"}:
        raise ConfigError(
            f"local_sgd.steps does not go with precision={config.precision}",
            fix="set precision=bf16, or local_sgd.steps=0",
        )


def _divisors(number: int) -> str:
    """Return what divides a number, in words.

    >>> _divisors(6)
    '1, 2, 3, 6'
    """
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
