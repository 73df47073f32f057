"""How much the tensors of two safetensors files differ.

Its own file, although only `compare_worlds` imports it: it is arithmetic on two files, the other
starts processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.rundir import GRADIENT

_ROUNDING_ONLY = 1e-5


def tensor_sizes(
    reference: Path, other: Path, *, gradients: bool = False
) -> dict[str, tuple[float, float]]:
    """Return the largest absolute and relative difference of every gradient, or of every other tensor, of two files.

    Relative to the largest value among the tensors of its kind (weights, first moments, ...).
    Weights whose true gradient is 0, such as a bias before BatchNorm, are left out: their gradient
    is rounding noise, which Adam scales up to full steps.
    """
    import numpy
    from safetensors.numpy import load_file

    expected, actual = load_file(reference), load_file(other)
    scales: dict[str, float] = {}
    for name, value in expected.items():
        largest = float(numpy.max(numpy.abs(value), initial=0.0))
        kind = _kind(name)
        scales[kind] = max(scales.get(kind, 1e-30), largest)
    sizes = {}
    for name in expected.keys() & actual.keys():
        if name.startswith(GRADIENT) is not gradients:
            continue
        difference = numpy.abs(expected[name].astype(numpy.float64) - actual[name])
        largest = float(numpy.max(difference, initial=0.0))
        if not math.isfinite(largest):
            sizes[name] = (math.inf, math.inf)
        elif not _is_rounding_noise(name, expected, scales):
            sizes[name] = (largest, largest / scales[_kind(name)])
    return sizes


def _is_rounding_noise(name: str, tensors: Mapping[str, Any], scales: Mapping[str, float]) -> bool:
    parameter = name.removeprefix("model.") if name.startswith("model.") else name.split(".", 2)[-1]
    moment = tensors.get(f"optimizer.exp_avg.{parameter}")
    if moment is None or not moment.size:
        return False
    return float(abs(moment).max()) <= _ROUNDING_ONLY * scales["optimizer.exp_avg"]


def _kind(name: str) -> str:
    """Return which group of tensors a name belongs to.

    >>> _kind("model.fc1.weight"), _kind("optimizer.exp_avg.fc1.weight")
    ('model', 'optimizer.exp_avg')
    """
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "optimizer" else parts[0]
