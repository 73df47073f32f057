"""How much the tensors of two dumps differ.

Its own file, although only `compare_worlds` and `compare_rounded` import it: it is arithmetic on two files, the others
start processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

DUMP_FILE = "tensors.safetensors"
"""All tensors after one step, in the folder of a record."""
GRADIENT = "gradient."
"""What begins the names of the gradients among them."""
PARAMETERS, NARROW = "parameters", "narrow"
"""Where the file's metadata lists which tensors are weights, and which have 16 bits or less, as JSON."""

_ONLY_ROUNDING = 1e-10
"""An element whose mean square gradient is at most this part of the largest gets nothing but rounding as its gradient."""
_ROUNDING_MAY_MOVE = 0.25
"""How far that may have moved a weight, as a part of the largest weight: Adam scales any gradient up to full steps."""
_SMALL = 0.01
"""Buffers smaller than this part of the largest weight are compared by that part of it."""
_SMALL_GRADIENT = 0.05
"""The same for gradients: of a sum whose terms cancel, rounding may be what is left."""

_FEW_NARROW_STEPS = 4 * 2.0**-8
"""How far a tensor of bfloat16 may differ, as a part of its scale: a difference in the last bit is 2**-8 of a value."""
_OF_MODEL = ("model.", "buffer.")

Sizes = dict[str, tuple[float, float]]
"""The largest absolute and relative difference, by the name of the tensor.

Infinite: one file lacks the tensor, or it has another shape, or a NaN or infinity that the other has not.
"""


def tensor_sizes(reference: Path, other: Path) -> Sizes:
    """Return how much weights, buffers and optimizer state differ.

    Weights are measured by the largest weight, optimizer state by the largest of its kind (first moments, ...), and
    buffers by their own largest value. An element of a weight that gets only rounding as its gradient, such as a bias
    before BatchNorm, may differ: Adam scales rounding up to full steps. Then buffers, such as running means, may differ as much.
    """
    expected, actual = _read(reference), _read(other)
    names = expected.tensors.keys() | actual.tensors.keys()
    sizes, moved = {}, 0.0
    for name in sorted(names, key=lambda name: name not in expected.parameters):
        apart = _apart(expected.tensors.get(name), actual.tensors.get(name))
        scale = expected.scale(name)
        noise = expected.noise(name), actual.noise(name)
        if noise[0] is not None and noise[1] is not None and noise[0].shape == apart.shape:
            may_move = noise[0] & noise[1] & (apart <= _ROUNDING_MAY_MOVE * scale)
            moved = max(moved, float(apart[may_move].max(initial=0.0)))
            apart = apart[~may_move]
        if name.startswith(_OF_MODEL) and name not in expected.parameters:
            apart = apart[apart > moved]
        if name in expected.narrow:
            apart = apart[apart > _FEW_NARROW_STEPS * scale]
        sizes[name] = _size(apart, scale)
    return sizes


def gradient_sizes(reference: Path, other: Path) -> Sizes:
    """Return how much gradients differ, each measured by its own largest value."""
    expected, actual = _read(reference).gradients, _read(other).gradients
    if not expected or not actual:
        return {}  # slices, as of FSDP, are not kept
    least = _SMALL_GRADIENT * max(map(_magnitude, expected.values()), default=0.0)
    sizes = {}
    for name in expected.keys() | actual.keys():
        own, others = expected.get(name), actual.get(name)
        if own is not None and others is not None and _overflows(own) and _overflows(others):
            continue  # as the first gradients of precision=fp16 may
        scale = least if own is None else max(_magnitude(own), least)
        sizes[name] = _size(_apart(own, others), scale)
    return sizes


@dataclass(frozen=True)
class _Dump:
    tensors: Mapping[str, Any]
    """Weights, buffers and optimizer state."""
    gradients: Mapping[str, Any]
    parameters: frozenset[str]
    """Which of the tensors are weights."""
    narrow: frozenset[str]
    """Which of the tensors are held in 16 bits or less."""

    @cached_property
    def _scales(self) -> dict[str, float]:
        largest: dict[str, float] = {}
        for name, value in self.tensors.items():
            kind = self._kind(name)
            if kind:
                largest[kind] = max(largest.get(kind, 0.0), _magnitude(value))
        return largest

    def _kind(self, name: str) -> str:
        """Return which tensors one is compared with; empty: with none."""
        if name.startswith("optimizer."):
            return name.split(".")[1]
        return "weight" if name in self.parameters else ""

    def scale(self, name: str) -> float:
        """Return by what a difference of a tensor is measured."""
        if kind := self._kind(name):
            return self._scales.get(kind, 0.0)
        own = _magnitude(self.tensors[name]) if name in self.tensors else 0.0
        return max(own, _SMALL * self._scales.get("weight", 0.0))

    def noise(self, name: str) -> Any:
        """Return which elements of a weight get only rounding as their gradient; None if that is not known."""
        for kind in ("exp_avg_sq", "square_avg"):
            squares = self.tensors.get(f"optimizer.{kind}.{name.removeprefix('model.')}")
            if squares is not None and name in self.parameters:
                return squares <= _ONLY_ROUNDING * self._scales[kind]
        return None


def _read(file: Path) -> _Dump:
    import numpy
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as source:
        found = {name: numpy.atleast_1d(source.get_tensor(name)) for name in source.keys()}  # noqa: SIM118 - not a mapping
        metadata = source.metadata() or {}
    gradients = {name: value for name, value in found.items() if name.startswith(GRADIENT)}
    tensors = {name: value for name, value in found.items() if name not in gradients}
    named = [frozenset(json.loads(metadata.get(each, "[]"))) for each in (PARAMETERS, NARROW)]
    return _Dump(tensors, gradients, *named)


def _apart(expected: Any, actual: Any) -> Any:
    """Return how far elements are apart; infinite if the tensors cannot be compared, 0 for the same NaN or infinity."""
    import numpy

    if expected is None or actual is None or expected.shape != actual.shape:
        return numpy.full(1, numpy.inf)
    first, second = _wide(expected), _wide(actual)
    is_same = (expected == actual) | (numpy.isnan(first) & numpy.isnan(second))
    apart = numpy.abs(numpy.subtract(first, second, out=numpy.zeros_like(first), where=~is_same))
    return numpy.where(numpy.isfinite(apart), apart, numpy.inf)


def _size(apart: Any, scale: float) -> tuple[float, float]:
    largest = float(apart.max(initial=0.0))
    return largest, largest / max(scale, 1e-30)


def _magnitude(values: Any) -> float:
    """Return the largest magnitude that is finite."""
    import numpy

    magnitudes = numpy.abs(_wide(values))
    return float(magnitudes.max(initial=0.0, where=numpy.isfinite(magnitudes)))


def _overflows(values: Any) -> bool:
    import numpy

    return not numpy.isfinite(values).all()


def _wide(values: Any) -> Any:
    """Return a copy in double precision."""
    import numpy

    return values.astype(numpy.complex128 if numpy.iscomplexobj(values) else numpy.float64)
