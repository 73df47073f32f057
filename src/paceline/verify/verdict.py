"""The answer of `paceline verify`: the same bits, or the first difference, its cause, and how that was shown."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.verify.causes import HIDDEN, Cause


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    world: int
    step: int
    tensor: str
    largest: float = math.nan
    relative: float = math.nan
    cause: Cause = field(default_factory=Cause)
    resumed_after: int = 0
    """The step after which the other run was resumed; 0: it was not."""


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of a comparison of world sizes."""

    same: bool
    script: str
    worlds: list[int]
    steps: int
    tensors: int
    metrics: int
    """Metrics of the evaluations that were compared."""
    digests: dict[int, str]
    resumed_after: int = 0
    """The step after which the last world size was resumed at the first; 0: there was no resume."""
    workers: int = 0
    """Worker processes that read the data of the resumed run only; 0: those of the script."""
    workers_failed: str = ""
    """Why the resumed run had no worker processes; empty: it had, or cannot have them."""
    epoch_steps: int = 0
    """Steps to which every epoch was cut; 0: epochs were whole."""
    tolerance: float = 0.0
    largest_relative: float = 0.0
    compression: str = "none"
    """With another one than none, step 1 was compared, and no later one."""
    difference: Difference | None = None

    @property
    def is_compressed(self) -> bool:
        """Whether gradients were rounded on their way between ranks."""
        return self.compression != "none"


def as_dict(result: VerifyResult) -> dict[str, Any]:
    """Return the result as JSON values, with cause and fix spelled out."""
    values = asdict(result)
    if not math.isfinite(result.largest_relative):
        values["largest_relative"] = None
    if result.difference:
        cause = result.difference.cause
        more = {"known": cause.is_known, "text": cause.text, "fix": cause.fix}
        values["difference"]["cause"] |= more
        for name in ("largest", "relative"):
            if not math.isfinite(values["difference"][name]):
                values["difference"][name] = None
    return values


def describe(result: VerifyResult) -> str:
    """Return the result as text for the terminal."""
    parts = [describe_begin(result), describe_end(result)]
    if result.difference:
        parts.insert(1, describe_difference(result))
    return "\n".join(parts)


def describe_begin(result: VerifyResult) -> str:
    """Return what was compared, and the digest of each world size."""
    digests = [describe_digest(world, digest) for world, digest in result.digests.items()]
    return "\n".join([describe_run(result), *digests])


def describe_run(result: VerifyResult) -> str:
    """Return what was compared, in one line."""
    return f"{result.script}: {_compared(result)}"


def describe_digest(world: int, digest: str) -> str:
    """Return the line of a world size."""
    return f"  {world} rank{'s' if world > 1 else ' '}  {digest[:16]}"


def describe_difference(result: VerifyResult) -> str:
    """Return where the runs differ first, which is known before the cause."""
    difference = result.difference
    assert difference is not None
    where = "before the first step" if difference.step == 0 else f"step {difference.step}"
    head = f"world size {difference.world} differs from world size {result.worlds[0]}"
    if difference.resumed_after:
        workers = f" with read.workers={result.workers}" if result.workers else ""
        head = (
            f"world size {result.worlds[-1]}, saved after step {difference.resumed_after} and resumed at world size "
            f"{difference.world}{workers}, differs from a run without a resume"
        )
    label = "difference" if difference.cause.why == HIDDEN else "first difference"
    lines = [f"not the same: {head}", f"  {label}: {where}, {difference.tensor}"]
    return "\n".join([*_also_compared(result), *lines])


def describe_end(result: VerifyResult) -> str:
    """Return the verdict: that the bits are the same, or the cause of the difference."""
    if result.difference:
        return _describe_cause(result.difference)
    return "\n".join([*_also_compared(result), _conclusion(result)])


def _compared(result: VerifyResult) -> str:
    if result.is_compressed:
        return f"samples, losses and gradients of step 1, options of all steps; compression={result.compression} lets later steps differ"
    tensors = f"{result.tensors} tensors of weights and optimizer state, and the losses"
    steps = f"{result.steps} step{'s' if result.steps > 1 else ''}"
    if result.epoch_steps:
        steps += f" (epochs cut to {result.epoch_steps})"
    return f"{steps}, {tensors}"


def _also_compared(result: VerifyResult) -> list[str]:
    """Return the lines on what else was compared, and what was not."""
    if result.is_compressed:
        return []
    also = ["buffers", "options"]
    if not result.tolerance:
        also.append("tracked objects")
    if result.metrics and not result.tolerance:
        also.append(f"{result.metrics} metric{'s' if result.metrics > 1 else ''}")
    if result.resumed_after:
        workers = f" with read.workers={result.workers}" if result.workers else ""
        also.append(f"a resume after step {result.resumed_after}{workers}")
    lines = [f"  also compared: {', '.join(also)}"]
    if result.workers_failed:
        lines.append(
            f"  not compared: read.workers=2, with which the script fails: {result.workers_failed}"
        )
    return lines


def _conclusion(result: VerifyResult) -> str:
    found = f"{result.largest_relative:.1e} (allowed {result.tolerance:.0e})"
    if result.is_compressed:
        return (
            f"within tolerance: exact=false, largest relative difference of a gradient {found}\n"
            f"  to compare all steps: run verify without compression={result.compression}"
        )
    if result.tolerance:
        return (
            f"within tolerance: exact=false, largest relative difference {found}\n"
            "  not compared with exact=false: metrics, numbers in tracked objects, a resume"
        )
    return "the same bits"


def _describe_cause(difference: Difference) -> str:
    cause, lines = difference.cause, []
    if math.isinf(difference.largest):
        lines.append("  size: NaN, infinite, of another shape, or missing in one of the runs")
    elif difference.largest > 0:  # not NaN, and not between the ranks of one world
        lines.append(f"  size: up to {difference.largest:.3g}, relative {difference.relative:.3g}")
    lines.append(f"  cause: {cause.text}")
    for number, shown in enumerate(cause.shown_by):
        label = ("shown by: " if cause.is_known else "tried: ") if not number else ""
        lines.append(f"    {label}{shown}")
    return "\n".join([*lines, f"  fix: {cause.fix}"])
