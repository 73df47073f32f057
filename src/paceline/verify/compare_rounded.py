"""Comparison of runs with exact=false, whose sums may be rounded differently.

Without compression, the tensors after the last step are compared. With it only the first step: after a rounded gradient,
Adam makes full steps of small differences, and runs drift apart.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.errors import PacelineError
from paceline.verify.causes import Cause
from paceline.verify.records import Record
from paceline.verify.tensor_diff import tensor_sizes
from paceline.verify.traces import Change, Trace, distance, first_change, size_of
from paceline.verify.verdict import Difference

TOLERANCE = 1e-3
"""Largest relative difference allowed with exact=false: largest difference by largest value."""
GRADIENT_TOLERANCES = {"fp16": 16 * 2.0**-11, "bf16": 16 * 2.0**-8, "powersgd": TOLERANCE}
"""The same for gradients, which compression rounds several times. PowerSGD begins after the first step."""

_FIRST_STEP = 1
_NEVER_ROUNDED = ("state", "lanes", "samples")
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
    """Compare the last tensors, or with compression the first step."""
    first, *_ = records.values()
    if first.compression != "none":
        return _compare_compressed(dumps, list(records), first.compression)
    step = first.steps[-1].step
    for world in records:
        dumps.trace(world, step, "usual")
    apart = _largest(dumps, list(records))
    difference = _difference(apart, step) if apart.relative > TOLERANCE else None
    return Rounded(TOLERANCE, apart.relative, difference)


def _compare_compressed(dumps: Dumps, worlds: list[int], compression: str) -> Rounded:
    tolerance = GRADIENT_TOLERANCES[compression]
    reference, *others = [dumps.trace(world, _FIRST_STEP, "usual")[1] for world in worlds]
    for world, trace in zip(worlds[1:], others, strict=True):
        if reference and trace and (change := _change_before_the_sum(reference, trace)):
            shown = f"what differs first in step 1: {change.where} of {', '.join(change.names)}"
            cause = Cause(shown_by=[shown, _RUN_EXACT])
            where = (world, _FIRST_STEP, change.names[0], math.nan, math.nan)
            return Rounded(tolerance, 0.0, Difference(*where, cause), compression)
    apart = _largest(dumps, worlds, gradients=True)
    difference = _difference(apart, _FIRST_STEP) if apart.relative > tolerance else None
    return Rounded(tolerance, apart.relative, difference, compression)


def _change_before_the_sum(reference: Trace, trace: Trace) -> Change | None:
    """Return how samples or losses differ, if they do.

    On a GPU, gradients of lanes differ by rounding, too: without `exact`, kernels may add in any order.
    """
    change = first_change(reference, trace)
    if change is None or change.where in _NEVER_ROUNDED:
        return change
    if change.where != "loss":
        return None
    apart = distance(reference, trace, "loss", change.names)
    return change if apart > TOLERANCE * size_of(reference, "loss", change.names) else None


def _difference(apart: _Apart, step: int) -> Difference:
    cause = Cause(shown_by=[_RUN_EXACT])
    return Difference(apart.world, step, apart.name, apart.largest, apart.relative, cause)


def _largest(dumps: Dumps, worlds: list[int], *, gradients: bool = False) -> _Apart:
    """Return the tensor that differs most from that of the first world."""
    reference, *others = worlds
    worst = _Apart(0.0, others[0], "", 0.0)
    for world in others:
        sizes = tensor_sizes(dumps.dump(reference), dumps.dump(world), gradients=gradients)
        if gradients and not sizes:
            raise PacelineError(
                "no gradient was left to compare at the end of step 1: the script has cleared them",
                fix="remove optimizer.zero_grad() (Paceline clears gradients itself), or run verify without compression",
            )
        for name, (largest, relative) in sizes.items():
            worst = max(worst, _Apart(relative, world, name, largest))
    return worst
