"""Is it the same training at every world size? Runs it, compares the records, and looks for the cause of a difference."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
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
"""Largest relative difference that exact=false may show: of a tensor's largest difference to its largest value."""

_ROUNDING = 1e-4  # relative: what another order of summation explains after a few steps in float32
_ROUNDINGS = 8  # the same in units of rounding, for coarser types


@dataclass(frozen=True)
class Comparison:
    """One script, and how to run it for a record."""

    target: Program
    arguments: tuple[str, ...]
    steps: int
    folder: Path
    progress: TextIO | None

    def record(self, world: int, label: str, dump_step: int = -1) -> Record:
        """Run the script at one world size and read what it recorded."""
        if self.progress is not None:
            self.progress.write(
                f"running {self.target.name} on {world} rank{'s' if world > 1 else ''} ({label}) ...\n"
            )
        home = self.home(world, label)
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

    def home(self, world: int, label: str) -> Path:
        """Return the folder of one recorded run."""
        return self.folder / f"world-{world}-{label}"


def verify(
    target: Program,
    worlds: list[int],
    steps: int,
    arguments: tuple[str, ...],
    progress: TextIO | None = None,
) -> VerifyResult:
    """Run a target at each world size and compare all with the first."""
    with _scratch() as folder:
        comparison = Comparison(target, arguments, steps, folder, progress)
        records = {world: comparison.record(world, "first") for world in worlds}
        reference = records[worlds[0]]
        found = [(world, first_difference(reference, records[world])) for world in worlds[1:]]
        parted = [(world, *where) for world, where in found if where]
        if parted and not reference.exact:
            return _within_tolerance(comparison, records, worlds)
        difference = _explain(comparison, records, *parted[0]) if parted else None
        return _verdict(comparison, records, worlds, difference)


def _verdict(
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
    """Run both worlds again for the tensors of that step, and see whether each still agrees with itself."""
    reference_world = next(iter(records))
    again = comparison.record(reference_world, "again", dump_step=max(1, step))
    other_again = comparison.record(world, "again", dump_step=max(1, step))
    repeatable = is_repeat(records[reference_world], again) and is_repeat(
        records[world], other_again
    )
    largest, relative = _size(comparison, records, reference_world, world, step, tensor)
    if not repeatable:
        cause = "unseeded"
    elif tensor == STEPS:
        cause = "steps"
    else:
        cause = find_cause(records[reference_world], records[world], step, relative)
    return Difference(world, step, tensor, largest, relative, cause)


def find_cause(one: Record, other: Record, step: int, relative: float) -> str:
    """Return the likely cause of the first difference of two repeatable runs."""
    mine, theirs = (
        next(line for line in record.steps if line.step == step) for record in (one, other)
    )
    if step == 0:
        return "first_weights"
    if mine.samples != theirs.samples:
        return "data_order"
    if not (mine.ranks_agree and theirs.ranks_agree):
        return "ranks_diverge"
    rounding = max(_ROUNDING, _ROUNDINGS * one.epsilon)
    if abs(mine.loss - theirs.loss) <= rounding * max(1e-12, abs(mine.loss)):
        return "summation" if relative <= rounding else "update"
    if one.norms:
        return "batchnorm"
    return "randomness" if mine.generators != theirs.generators else "mean_of_means"


def _size(
    comparison: Comparison, records: dict[int, Record], one: int, other: int, step: int, tensor: str
) -> tuple[float, float]:
    """Return the largest difference at the step, absolute and relative, from the losses or the written tensors."""
    if tensor == LOSS:
        mine, theirs = (
            next(line.loss for line in records[world].steps if line.step == step)
            for world in (one, other)
        )
        return abs(mine - theirs), abs(mine - theirs) / max(abs(mine), 1e-30)
    sizes = tensor_sizes(
        comparison.home(one, "again") / DUMP_FILE, comparison.home(other, "again") / DUMP_FILE
    )
    return sizes.get(tensor) or max(sizes.values(), default=(math.nan, math.nan))


def _within_tolerance(
    comparison: Comparison, records: dict[int, Record], worlds: list[int]
) -> VerifyResult:
    """Compare the last tensors of runs that need not have the same bits."""
    last = records[worlds[0]].steps[-1].step
    for world in worlds:
        comparison.record(world, "dumped", dump_step=last)
    worst: tuple[float, int, str, float] = (0.0, worlds[1], "", 0.0)
    for world in worlds[1:]:
        sizes = tensor_sizes(
            comparison.home(worlds[0], "dumped") / DUMP_FILE,
            comparison.home(world, "dumped") / DUMP_FILE,
        )
        worst = max(
            worst,
            *((relative, world, name, largest) for name, (largest, relative) in sizes.items()),
        )
    relative, world, name, largest = worst
    if relative <= TOLERANCE:
        return _verdict(
            comparison, records, worlds, None, tolerance=TOLERANCE, largest_relative=relative
        )
    cause = find_cause(records[worlds[0]], records[world], last, relative)
    return _verdict(
        comparison,
        records,
        worlds,
        Difference(world, last, name, largest, relative, cause),
        tolerance=TOLERANCE,
    )


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        yield Path(name)
