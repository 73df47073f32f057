"""Run a training at several world sizes, compare the records, find the cause of a difference."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline.launch.failure import RunFailed
from paceline.launch.spec import LaunchSpec, Program
from paceline.launch.supervisor import launch
from paceline.rundir import DUMP_FILE
from paceline.verify.records import LOSS, STEPS, Record, first_difference, is_repeat, read_record
from paceline.verify.tensor_diff import tensor_sizes
from paceline.verify.verdict import Difference, VerifyResult

TOLERANCE = 1e-3
"""Largest relative difference allowed with exact=false: largest difference by largest value."""

_ROUNDING = 1e-4  # relative; another summation order explains this much after a few float32 steps
_ROUNDING_UNITS = 8  # the same in rounding errors of the dtype, for coarser dtypes

_FIRST, _REPEAT, _DUMP = "first", "again", "dumped"
_PURPOSE = {
    _FIRST: "",
    _REPEAT: " again, to see whether it repeats",
    _DUMP: " again, to compare the last tensors",
}


@dataclass(frozen=True)
class Comparison:
    """A script, and how to run it for a record."""

    target: Program
    arguments: tuple[str, ...]
    steps: int
    folder: Path
    progress: TextIO | None

    def record(self, world: int, label: str, dump_step: int = -1) -> Record:
        """Run the script at one world size and return its record."""
        if self.progress is not None:
            ranks = "1 rank" if world == 1 else f"{world} ranks"
            self.progress.write(f"running {self.target.name} on {ranks}{_PURPOSE[label]} ...\n")
        home = self._home(world, label)
        settings = {
            "record.to": str(home),
            "record.steps": self.steps,
            "record.dump_step": dump_step,
            "runs": str(home / "runs"),
        }
        failure = launch(LaunchSpec(self.target, world, self.arguments, settings))
        if failure is not None:
            raise RunFailed(self.target.name, world, failure)
        return read_record(home, self.target.name)

    def dump(self, world: int, label: str) -> Path:
        """Return the file with the tensors of one recorded run."""
        return self._home(world, label) / DUMP_FILE

    def _home(self, world: int, label: str) -> Path:
        return self.folder / f"world-{world}-{label}"


def verify(
    target: Program,
    worlds: list[int],
    steps: int,
    arguments: tuple[str, ...],
    progress: TextIO | None = None,
) -> VerifyResult:
    """Run a program at each world size and compare all records with the first."""
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        comparison = Comparison(target, arguments, steps, Path(folder), progress)
        records = {world: comparison.record(world, _FIRST) for world in worlds}
        reference = records[worlds[0]]
        for world in worlds[1:]:
            if difference := first_difference(reference, records[world]):
                if not reference.exact:
                    return _within_tolerance(comparison, records, worlds)
                cause = _explain(comparison, records, world, *difference)
                return _result(comparison, records, worlds, cause)
        return _result(comparison, records, worlds, None)


def _result(
    comparison: Comparison,
    records: dict[int, Record],
    worlds: list[int],
    difference: Difference | None,
    **more: float,
) -> VerifyResult:
    reference = records[worlds[0]]
    return VerifyResult(
        same=difference is None,
        script=comparison.target.name,
        worlds=worlds,
        steps=reference.steps[-1].step,
        tensors=len(reference.steps[-1].tensors),
        digests={world: record.digest for world, record in records.items()},
        difference=difference,
        **more,
    )


def _explain(
    comparison: Comparison, records: dict[int, Record], world: int, step: int, tensor: str
) -> Difference:
    """Run both world sizes again, to dump the tensors and to see whether each repeats itself."""
    reference = next(iter(records))
    repeatable = True
    for size in (reference, world):
        repeat = comparison.record(size, _REPEAT, dump_step=max(1, step))
        repeatable &= is_repeat(records[size], repeat)
    if tensor == LOSS:
        largest, relative = _loss_difference(records[reference], records[world], step)
    else:
        sizes = tensor_sizes(comparison.dump(reference, _REPEAT), comparison.dump(world, _REPEAT))
        unknown = (math.nan, math.nan)
        largest, relative = sizes.get(tensor) or max(sizes.values(), default=unknown)
    if not repeatable:
        cause = "unseeded"
    elif tensor == STEPS:
        cause = "steps"
    else:
        cause = find_cause(records[reference], records[world], step, relative)
    return Difference(world, step, tensor, largest, relative, cause)


def find_cause(reference: Record, other: Record, step: int, relative: float) -> str:
    """Return the key in CAUSES for the first difference of two repeatable runs."""
    expected, actual = reference.step(step), other.step(step)
    if step == 0:
        return "first_weights"
    if expected.samples != actual.samples:
        return "data_order"
    if not (expected.ranks_agree and actual.ranks_agree):
        return "ranks_diverge"
    rounding = max(_ROUNDING, _ROUNDING_UNITS * reference.epsilon)
    if abs(expected.loss - actual.loss) <= rounding * max(1e-12, abs(expected.loss)):
        return "summation" if relative <= rounding else "update"
    if reference.norms:
        return "batchnorm"
    return "randomness" if expected.generators != actual.generators else "mean_of_means"


def _loss_difference(reference: Record, other: Record, step: int) -> tuple[float, float]:
    expected, actual = reference.step(step).loss, other.step(step).loss
    absolute = abs(expected - actual)
    return absolute, absolute / max(abs(expected), 1e-30)


def _within_tolerance(
    comparison: Comparison, records: dict[int, Record], worlds: list[int]
) -> VerifyResult:
    """Compare the last tensors of runs with exact=false, which may differ by rounding."""
    reference = worlds[0]
    last = records[reference].steps[-1].step
    for world in worlds:
        comparison.record(world, _DUMP, dump_step=last)
    worst: tuple[float, int, str, float] = (0.0, worlds[1], "", 0.0)
    for world in worlds[1:]:
        sizes = tensor_sizes(comparison.dump(reference, _DUMP), comparison.dump(world, _DUMP))
        for name, (largest, relative) in sizes.items():
            worst = max(worst, (relative, world, name, largest))
    relative, world, name, largest = worst
    if relative <= TOLERANCE:
        tolerated = {"tolerance": TOLERANCE, "largest_relative": relative}
        return _result(comparison, records, worlds, None, **tolerated)
    cause = find_cause(records[reference], records[world], last, relative)
    difference = Difference(world, last, name, largest, relative, cause)
    return _result(comparison, records, worlds, difference, tolerance=TOLERANCE)
