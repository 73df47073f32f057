"""The answer of `paceline verify`: the same bits, or the first difference and its likely cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CAUSES = {
    "unseeded": (
        "unseeded randomness: two runs at the same world size differ",
        (
            "draw random numbers from the global generator of torch, NumPy or Python, which Paceline "
            "seeds per lane; not from os.urandom, an unseeded generator, or the clock"
        ),
    ),
    "first_weights": (
        (
            "different initial weights: the model is built from randomness that depends on the rank "
            "or the world size"
        ),
        (
            "build the model inside `with paceline.Run(config) as run`, which seeds the generators; "
            "do not seed with the rank"
        ),
    ),
    "ranks_diverge": (
        "unsynchronized gradients: after the step the ranks have different weights",
        "pass model and optimizer to `run.model` and `run.optimizer`, and step with `run.update`",
    ),
    "data_order": (
        "per-rank data order: in this step the ranks together used different samples",
        (
            "take batches from `run.steps`, whose order does not depend on the world size; "
            "with a sampler, use the global rank and set_epoch"
        ),
    ),
    "batchnorm": (
        "BatchNorm: its statistics depend on the number of samples per rank",
        "step with `run.update`, which runs lanes of a fixed size and merges their statistics",
    ),
    "randomness": (
        "per-rank randomness: dropout or noise is drawn from each rank's own generator",
        "step with `run.update`, which seeds the generators per lane; do not seed with the rank",
    ),
    "mean_of_means": (
        (
            "a loss that is a mean of means: lanes with different sample or token counts weigh the "
            "same"
        ),
        (
            "return (sum, count) from the loss function; `run.update` divides by the count of the "
            "whole step"
        ),
    ),
    "update": (
        (
            "the losses agree but the updates differ: the gradient or the learning rate is scaled by "
            "the number of ranks"
        ),
        (
            "take the mean over all samples, not the sum over ranks; "
            "scale the learning rate with lr.rule, which follows the batch size"
        ),
    ),
    "steps": (
        "different numbers of steps: the length of the loop depends on the world size",
        "loop over `run.steps`: its epochs have the same steps at every world size",
    ),
    "summation": (
        (
            "the order of summation: the difference is as small as rounding errors, "
            "and samples and random numbers agree"
        ),
        "set exact=true, and let `run.update` sum the gradients",
    ),
}
"""Likely cause and fix, by the key that is in the JSON."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    world: int
    step: int
    tensor: str
    largest: float
    relative: float
    cause: str


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of a comparison of world sizes."""

    same: bool
    script: str
    worlds: list[int]
    steps: int
    tensors: int
    digests: dict[int, str]
    tolerance: float = 0.0
    largest_relative: float = 0.0
    difference: Difference | None = None


def as_dict(result: VerifyResult) -> dict[str, Any]:
    """Return the result as JSON values, with cause and fix spelled out."""
    values = asdict(result)
    if result.difference:
        cause, fix = CAUSES[result.difference.cause]
        values["difference"] |= {"likely_cause": cause, "fix": fix}
    return values


def describe(result: VerifyResult) -> str:
    """Return the result as text for the terminal."""
    tensors = f"{result.tensors} tensors of weights and optimizer state, and the losses"
    lines = [f"{result.script}: {result.steps} steps, {tensors}"]
    for world, digest in result.digests.items():
        lines.append(f"  {world} rank{'s' if world > 1 else ' '}  {digest[:16]}")
    lines.append(_conclusion(result))
    return "\n".join(lines)


def _conclusion(result: VerifyResult) -> str:
    if result.difference:
        return _describe_difference(result, result.difference)
    if result.tolerance:
        largest = f"largest relative difference {result.largest_relative:.1e}"
        return f"within tolerance: exact=false, {largest} (allowed {result.tolerance:.0e})"
    return "the same bits"


def _describe_difference(result: VerifyResult, difference: Difference) -> str:
    cause, fix = CAUSES[difference.cause]
    where = "before the first step" if difference.step == 0 else f"step {difference.step}"
    return (
        f"not the same: world size {difference.world} differs from world size {result.worlds[0]}\n"
        f"  first difference: {where}, {difference.tensor}\n"
        f"  size: up to {difference.largest:.3g}, relative {difference.relative:.3g}\n"
        f"  likely cause: {cause}\n"
        f"  fix: {fix}"
    )
