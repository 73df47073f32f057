"""How far apart two sets of tensors are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NOTHING_BUT_ROUNDING = 1e-5


def tensor_sizes(one: Path, other: Path) -> dict[str, tuple[float, float]]:
    """Return the largest difference of every tensor of two safetensors files, absolute and relative.

    Relative to the largest value among tensors of its kind (weights, first moments, ...). Left out are weights whose
    true gradient is 0, such as a bias before BatchNorm: what they got is rounding, which Adam turns into whole steps.
    """
    import numpy
    from safetensors.numpy import load_file

    mine, theirs = load_file(one), load_file(other)
    scales: dict[str, float] = {}
    for name, value in mine.items():
        scales[_kind(name)] = max(
            scales.get(_kind(name), 1e-30), float(numpy.max(numpy.abs(value), initial=0.0))
        )
    sizes = {}
    for name in mine.keys() & theirs.keys():
        largest = float(
            numpy.max(numpy.abs(mine[name].astype(numpy.float64) - theirs[name]), initial=0.0)
        )
        relative = largest / scales[_kind(name)]
        sizes[name] = (largest, relative) if math.isfinite(largest) else (math.inf, math.inf)
    return {
        name: size
        for name, size in sizes.items()
        if not _only_rounding(name, mine, scales) or math.isinf(size[0])
    }


def _only_rounding(name: str, tensors: Mapping[str, Any], scales: Mapping[str, float]) -> bool:
    parameter = name.removeprefix("model.") if name.startswith("model.") else name.split(".", 2)[-1]
    moment = tensors.get(f"optimizer.exp_avg.{parameter}")
    if moment is None or not moment.size:
        return False
    return float(abs(moment).max()) <= _NOTHING_BUT_ROUNDING * scales["optimizer.exp_avg"]


def _kind(name: str) -> str:
    """Return what sort of tensor a name stands for.

    >>> _kind("model.fc1.weight"), _kind("optimizer.exp_avg.fc1.weight")
    ('model', 'optimizer.exp_avg')
    """
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "optimizer" else parts[0]
