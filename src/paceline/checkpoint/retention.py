"""Retention: which checkpoints to keep.

Apart from the saver, because `paceline ckpt list` needs it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Metrics = Mapping[int, Mapping[str, float]]
"""Evaluation metrics by step."""


@dataclass(frozen=True)
class Retention:
    """How many checkpoints to keep."""

    keep: int = 3
    """Number of newest checkpoints to keep."""
    best: str = ""
    """Also keep the best checkpoint by this metric, such as `max:acc`."""

    def expired(self, metrics: Metrics) -> list[int]:
        """Return the steps whose checkpoints may be deleted.

        >>> metrics = {10: {}, 20: {"acc": 0.9}, 30: {"acc": 0.8}, 40: {}, 50: {}}
        >>> Retention(keep=2, best="max:acc").expired(metrics)
        [10, 30]
        """
        steps = sorted(metrics)
        kept: set[int | None] = {*steps[-self.keep :]}
        if self.best:
            kept.add(best_step(metrics, self.best))
        return [step for step in steps if step not in kept]


def best_step(metrics: Metrics, best: str) -> int | None:
    """Return the step with the best value of a metric; the earlier step wins a tie.

    >>> best_step({1: {"acc": 0.9}, 2: {"acc": 0.8}, 3: {}}, "max:acc")
    1
    """
    direction, _, name = best.partition(":")
    sign = -1.0 if direction == "max" else 1.0
    candidates = []
    for step, values in metrics.items():
        value = values.get(name, math.nan)
        if not math.isnan(value):
            candidates.append((sign * value, step))
    return min(candidates)[1] if candidates else None
