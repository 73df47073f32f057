"""Comparison of runs with exact=false, whose sums may be rounded differently.

What no rounding explains must be the same: the number of steps, the options of the optimizers, the names of the tensors,
the state of all ranks of a world, and the samples of step 1. The gradients of step 1, the losses, and the tensors after
the last step may differ by a tolerance. With compression, nothing after step 1 is compared so: after a rounded gradient,
Adam makes full steps of small differences, and runs drift apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.errors import PacelineError
from paceline.verify.causes import HIDDEN, Cause
from paceline.verify.records import LOSS, Record, first_difference, without_rounding
from paceline.verify.tensor_diff import Sizes, gradient_sizes, tensor_sizes
from paceline.verify.traces import (
    Trace,
    changed_lanes,
    distance,
    lanes_change,
    size_of,
    start_change,
)
from paceline.verify.verdict import Difference

TOLERANCE = 1e-3
"""Largest relative difference of losses and tensors: largest difference by largest value."""
_NARROW_LOSS_TOLERANCE = 1e-2
"""The same for losses that are computed in fp16 or bf16, where a GPU changes the last bits of every gradient."""
GRADIENT_TOLERANCES = {"none": 1e-2, "fp16": 16 * 2.0**-11, "bf16": 16 * 2.0**-8, "powersgd": 1e-2}
"""The same for gradients, which compression rounds several times. PowerSGD begins after the first step."""

_FIRST_STEP = 1
_OF_FIRST_UPDATE = re.compile(r"lane \d+")


class Dumps(Protocol):
    """Runs the script for a trace and for the tensors of a step."""

    def trace(self, world: int, step: int, arrangement: str) -> tuple[Record, Trace | None]:
        """Run the script once more with a trace of one step; return its record and the trace."""

    def dump(self, world: int, step: int) -> Path:
        """Return the file with the tensors of a traced run."""


class Rounded(NamedTuple):
    """How far runs are apart that may differ by rounding."""

    tolerance: float
    largest_relative: float
    difference: Difference | None
    """What is more than rounding."""
    compression: str = "none"


class _Apart(NamedTuple):
    relative: float
    world: int
    name: str
    largest: float


def compare_rounded(dumps: Dumps, records: dict[int, Record]) -> Rounded:
    """Compare what may not be rounded, then losses, gradients of step 1, and without compression the last tensors."""
    first, *_ = records.values()
    compression, worlds = first.compression, list(records)
    is_compressed = compression != "none"
    tolerance = GRADIENT_TOLERANCES[compression]
    found = _never_rounded(records)
    if not found and not is_compressed:
        found = _losses_apart(records)
    if found or (found := _changed_in_first_step(dumps, worlds, is_compressed=is_compressed)):
        return Rounded(tolerance if is_compressed else TOLERANCE, 0.0, found, compression)
    apart = _largest(dumps, worlds, _FIRST_STEP, gradient_sizes)
    if is_compressed and not apart.name:
        raise PacelineError(
            "step 1 computed no gradient, so there is nothing to compare with compression",
            fix="train by run.update(optimizer, loss, step), or run verify without compression",
        )
    if is_compressed or apart.relative > tolerance:
        return _judged(apart, _FIRST_STEP, tolerance, compression)
    last = first.steps[-1].step
    if last > _FIRST_STEP:
        for world in worlds:
            dumps.trace(world, last, "usual")
    return _judged(_largest(dumps, worlds, last, tensor_sizes), last, TOLERANCE, compression)


def _judged(apart: _Apart, step: int, tolerance: float, compression: str) -> Rounded:
    found = None
    if apart.relative > tolerance:
        where = (apart.world, step, apart.name, apart.largest, apart.relative)
        found = Difference(*where, Cause(why=HIDDEN))
    return Rounded(tolerance, apart.relative, found, compression)


def _never_rounded(records: dict[int, Record]) -> Difference | None:
    """Return the first difference that no order of summation explains."""
    reference, *others = map(without_rounding, records.values())
    for other in others:
        if found := first_difference(reference, other):
            return _unmeasured(other.world, *found)
    return None


def _losses_apart(records: dict[int, Record]) -> Difference | None:
    """Return the first loss that differs by more than rounding, relative to the largest loss."""
    reference, *others = records.values()
    trained = reference.steps[1:]  # the first line is the state before the first step
    tolerance = TOLERANCE if reference.precision == "fp32" else _NARROW_LOSS_TOLERANCE
    scale = max((abs(line.loss) for line in trained if math.isfinite(line.loss)), default=0.0)
    for other in others:
        for line in trained:
            loss = other.step(line.step).loss
            apart = 0.0 if loss.hex() == line.loss.hex() else abs(loss - line.loss)
            if not apart <= tolerance * scale:
                size = apart, apart / max(scale, 1e-30)
                return Difference(other.world, line.step, LOSS, *size, Cause(why=HIDDEN))
    return None


def _changed_in_first_step(
    dumps: Dumps, worlds: list[int], *, is_compressed: bool
) -> Difference | None:
    """Run step 1 again with traces, which leaves its tensors; return what differs before anything is summed."""
    reference, *others = [dumps.trace(world, _FIRST_STEP, "usual")[1] for world in worlds]
    for world, trace in zip(worlds[1:], others, strict=True):
        if (
            reference
            and trace
            and (what := _changed(reference, trace, is_compressed=is_compressed))
        ):
            return _unmeasured(world, _FIRST_STEP, what)
    return None


def _changed(reference: Trace, trace: Trace, *, is_compressed: bool) -> str:
    """Return which samples or lanes differ, and with compression the state before the step or losses of lanes.

    On a GPU, losses and gradients of lanes differ by rounding, too: without `exact`, kernels may add in any order.
    """
    if is_compressed and (change := start_change(reference, trace)):
        return change.names[0]
    change = lanes_change(reference, trace)
    if change and change.where in {"lanes", "samples"}:
        return f"the {change.where}: {', '.join(change.names)}"
    changed = [
        name
        for name in changed_lanes(reference, trace, "loss")
        if _OF_FIRST_UPDATE.fullmatch(name)  # later ones use weights that were rounded
    ]
    apart = distance(reference, trace, "loss", changed)
    if not is_compressed or apart <= TOLERANCE * size_of(reference, "loss", changed):
        return ""
    return f"the loss of {', '.join(changed)}"


def _unmeasured(world: int, step: int, what: str) -> Difference:
    return Difference(world, step, what, math.nan, math.nan, Cause(why=HIDDEN))


def _largest(
    dumps: Dumps, worlds: list[int], step: int, measure: Callable[[Path, Path], Sizes]
) -> _Apart:
    """Return the tensor that differs most from that of the first world."""
    reference, *others = worlds
    worst = _Apart(0.0, others[0], "", 0.0)
    for world in others:
        sizes = measure(dumps.dump(reference, step), dumps.dump(world, step))
        for name, (largest, relative) in sizes.items():
            worst = max(worst, _Apart(relative, world, name, largest))
    return worst
