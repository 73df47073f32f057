"""How much the tensors of two safetensors files differ.

Its own file, although only `compare_worlds` and `compare_rounded` import it: it is arithmetic on two files, the others
start processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.rundir import GRADIENT

_ROUNDING_ONLY = 1e-5
_SMALL_GRADIENT = 0.01
"""Gradients smaller than this part of the largest are compared by it: what is left of a sum may be rounding alone."""

Tensors = Mapping[str, Any]


def tensor_sizes(
    reference: Path, other: Path, *, gradients: bool = False
) -> dict[str, tuple[float, float]]:
    """Return the largest absolute and relative difference of every gradient, or of every other tensor, of two files.

    Gradients are compared with their own largest value, other tensors with the largest among their kind (weights, first
    moments, ...). Infinite: one file lacks the tensor, or it has another shape, or a NaN or infinity that the other has not.
    Weights whose true gradient is 0, such as a bias before BatchNorm, are left out: their gradient
    is rounding noise, which Adam scales up to full steps.
    """
    expected, actual = _load(reference, gradients=gradients), _load(other, gradients=gradients)
    scales = _gradient_scales(expected) if gradients else _scales(expected)
    sizes = {}
    for name in [*expected, *sorted(actual.keys() - expected.keys())]:
        largest = _largest_difference(expected.get(name), actual.get(name))
        if not math.isfinite(largest):
            sizes[name] = (math.inf, math.inf)
        elif gradients or not (_is_noise(name, expected) and _is_noise(name, actual)):
            sizes[name] = (largest, largest / scales[name])
    return sizes


def _load(file: Path, *, gradients: bool) -> Tensors:
    from safetensors.numpy import load_file

    tensors = load_file(file)
    return {name: tensors[name] for name in tensors if name.startswith(GRADIENT) is gradients}


def _largest_difference(expected: Any, actual: Any) -> float:
    import numpy

    if expected is None or actual is None or expected.shape != actual.shape:
        return math.inf
    first, second = expected.astype(numpy.float64), actual.astype(numpy.float64)
    is_same = (first == second) | (numpy.isnan(first) & numpy.isnan(second))
    difference = numpy.subtract(first, second, out=numpy.zeros_like(first), where=~is_same)
    return float(numpy.max(numpy.abs(difference), initial=0.0))


def _scales(tensors: Tensors) -> dict[str, float]:
    """Return by which value each tensor is measured: the largest of its kind."""
    largest: dict[str, float] = {}
    for name, value in tensors.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 1e-30), _largest_value(value))
    return {name: largest[_kind(name)] for name in tensors}


def _gradient_scales(tensors: Tensors) -> dict[str, float]:
    own = {name: _largest_value(value) for name, value in tensors.items()}
    least = max(_SMALL_GRADIENT * max(own.values(), default=0.0), 1e-30)
    return {name: max(value, least) for name, value in own.items()}


def _largest_value(value: Any) -> float:
    """Return the largest magnitude in a tensor; masks may hold infinities, which are no magnitude."""
    import numpy

    magnitude = numpy.abs(value.astype(numpy.float64))
    return float(numpy.max(magnitude, initial=0.0, where=numpy.isfinite(magnitude)))


def _is_noise(name: str, tensors: Tensors) -> bool:
    """Return whether the first moment of a weight is nothing but rounding."""
    parameter = name.removeprefix("model.") if name.startswith("model.") else name.split(".", 2)[-1]
    moment = f"optimizer.exp_avg.{parameter}"
    if moment not in tensors or not tensors[moment].size:
        return False
    return _largest_value(tensors[moment]) <= _ROUNDING_ONLY * _scales(tensors)[moment]


def _kind(name: str) -> str:
    """Return which group of tensors a name belongs to.

    >>> _kind("model.fc1.weight"), _kind("optimizer.exp_avg.fc1.weight")
    ('model', 'optimizer.exp_avg')
    """
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "optimizer" else parts[0]
