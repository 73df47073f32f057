"""Comparison of runs with exact=false, whose sums may be rounded differently.

What no rounding explains must be the same: the number of steps, the options of the optimizers, the names of the tensors,
the state of all ranks of a world, and the samples of one step. Losses, and the tensors after the last step, may differ by
a tolerance. With compression this is the first step and its gradients: after a rounded gradient, Adam makes full steps of
small differences, and runs drift apart.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.errors import PacelineError
from paceline.verify.causes import Cause
from paceline.verify.records import LOSS, Record, first_difference, without_rounding
from paceline.verify.tensor_diff import tensor_sizes
from paceline.verify.traces import Change, Trace, distance, lanes_change, size_of, start_change
from paceline.verify.verdict import Difference

TOLERANCE = 1e-3
"""Largest relative difference allowed with exact=false: largest difference by largest value."""
GRADIENT_TOLERANCES = {"fp16": 16 * 2.0**-11, "bf16": 16 * 2.0**-8, "powersgd": 1e-2}
"""The same for gradients, which compression rounds several times. PowerSGD begins after the first step."""

_FIRST_STEP = 1
_RUN_EXACT = "exact=false hides causes behind rounding: run verify with exact=true"


class Dumps(Protocol):
    """Runs the script for a trace and for the tensors of a step."""

    def trace(self, world: int, step: int, arrangement: str) -> tuple[Record, Trace | None]:
        """Run the script once more with a trace of one step; return its record and the trace."""

    def dump(self, world: int) -> Path:
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
    """Compare what may not be rounded, then the losses and the last tensors, or with compression those of step 1."""
    first, *_ = records.values()
    compressed = first.compression != "none"
    step = _FIRST_STEP if compressed else first.steps[-1].step
    tolerance = GRADIENT_TOLERANCES.get(first.compression, TOLERANCE)
    found = _never_rounded(records)
    if not found and not compressed:
        found = _losses_apart(records)
    if not found:
        found = _changed_within(dumps, step, list(records))
    relative = 0.0
    if not found:
        apart = _largest(dumps, list(records), gradients=compressed)
        relative = apart.relative
        if not relative <= tolerance:
            where = (apart.world, step, apart.name, apart.largest, relative)
            found = Difference(*where, Cause(shown_by=[_RUN_EXACT]))
    return Rounded(tolerance, relative, found, first.compression)


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
    scale = max((abs(line.loss) for line in trained if math.isfinite(line.loss)), default=0.0)
    for other in others:
        for line in trained:
            loss = other.step(line.step).loss
            apart = 0.0 if loss.hex() == line.loss.hex() else abs(loss - line.loss)
            if not apart <= TOLERANCE * scale:
                cause = Cause(shown_by=[_RUN_EXACT])
                return Difference(
                    other.world, line.step, LOSS, apart, apart / max(scale, 1e-30), cause
                )
    return None


def _changed_within(dumps: Dumps, step: int, worlds: list[int]) -> Difference | None:
    """Run a step again with traces, which leaves its tensors; return what differs before anything is summed."""
    reference, *others = [dumps.trace(world, step, "usual")[1] for world in worlds]
    for world, trace in zip(worlds[1:], others, strict=True):
        if reference and trace and (change := _change_before_the_sum(reference, trace, step)):
            shown = (
                f"what differs first in step {step}: {change.where} of {', '.join(change.names)}"
            )
            return _unmeasured(world, step, change.names[0], shown)
    return None


def _change_before_the_sum(reference: Trace, trace: Trace, step: int) -> Change | None:
    """Return how samples differ, and in step 1 the state before it or the losses, if they do.

    On a GPU, losses and gradients of lanes differ by rounding, too: without `exact`, kernels may add in any order.
    """
    is_first = step == _FIRST_STEP
    if is_first and (change := start_change(reference, trace)):
        return change
    change = lanes_change(reference, trace)
    if change is None or change.where in {"lanes", "samples"}:
        return change
    if change.where != "loss" or not is_first:
        return None
    apart = distance(reference, trace, "loss", change.names)
    return None if apart <= TOLERANCE * size_of(reference, "loss", change.names) else change


def _unmeasured(world: int, step: int, what: str, *shown: str) -> Difference:
    cause = Cause(shown_by=[*shown, _RUN_EXACT])
    return Difference(world, step, what, math.nan, math.nan, cause)


def _largest(dumps: Dumps, worlds: list[int], *, gradients: bool) -> _Apart:
    """Return the tensor that differs most from that of the first world."""
    reference, *others = worlds
    worst = _Apart(0.0, others[0], "", 0.0)
    for world in others:
        sizes = tensor_sizes(dumps.dump(reference), dumps.dump(world), gradients=gradients)
        if gradients and not sizes:
            raise PacelineError(
                "step 1 computed no gradient, so there is nothing to compare with compression",
                fix="train by run.update(optimizer, loss, step), or run verify without compression",
            )
        for name, (largest, relative) in sizes.items():
            worst = max(worst, _Apart(relative, world, name, largest))
    return worst
