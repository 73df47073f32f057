"""Which checkpoints are no longer needed."""

from __future__ import annotations

import math
from collections.abc import Mapping


def best_step(metrics: Mapping[int, Mapping[str, float]], best: str) -> int | None:
    """Return the step with the best value of a metric, the earlier one of two alike.

    >>> best_step({1: {"acc": 0.9}, 2: {"acc": 0.8}, 3: {}}, "max:acc")
    1
    """
    direction, _, name = best.partition(":")
    sign = -1.0 if direction == "max" else 1.0
    found = [
        (sign * values[name], step)
        for step, values in metrics.items()
        if not math.isnan(values.get(name, math.nan))
    ]
    return min(found)[1] if found else None


def no_longer_needed(
    metrics: Mapping[int, Mapping[str, float]], keep: int, best: str = ""
) -> list[int]:
    """Return the steps to delete: all but the newest ones, and the best by a metric.

    >>> no_longer_needed({10: {}, 20: {"acc": 0.9}, 30: {"acc": 0.8}, 40: {}, 50: {}}, keep=2, best="max:acc")
    [10, 30]
    """
    kept = set(sorted(metrics)[-keep:]) | ({best_step(metrics, best)} if best else set())
    return [step for step in sorted(metrics) if step not in kept]
