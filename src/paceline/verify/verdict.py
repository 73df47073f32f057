"""What a comparison of runs says: yes, or the first difference and its likely cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CAUSES = {
    "unseeded": (
        "unseeded randomness: the same world run twice does not agree with itself",
        (
            "draw random numbers from torch's, NumPy's or Python's global generator, which Paceline sets for each lane; "
            "not from os.urandom, a generator of your own without a seed, or the clock"
        ),
    ),
    "first_weights": (
        "the first weights are not the same: the model is built from randomness that depends on the rank or the world",
        "build the model inside `paceline.join`, which sets the generators; do not seed with the rank",
    ),
    "ranks_diverge": (
        "the ranks do not hold the same weights after the step: their gradients were not summed",
        "wrap the model with `paceline.parallelize`, and call the wrapped model",
    ),
    "data_order": (
        "per-rank data order: the ranks together did not use the same samples in this step",
        "take batches from `paceline.Batches`, whose order does not depend on the world; with a sampler, use the global rank and set_epoch",
    ),
    "batchnorm": (
        "BatchNorm: its statistics depend on how many samples a rank holds at once",
        "train with `paceline.Trainer` or `paceline.OptimizerStep`, which run lanes of a fixed size and merge the statistics",
    ),
    "randomness": (
        "randomness that depends on the rank: dropout or noise is drawn from each rank's own generator",
        "train with `paceline.Trainer` or `paceline.OptimizerStep`, which set the generators for each lane; do not seed with the rank",
    ),
    "mean_of_means": (
        "a loss that is a mean of means: lanes of different size or token count weigh the same",
        "let the loss function return (sum, count), and let `paceline.OptimizerStep` divide by the count of the whole step",
    ),
    "update": (
        "the losses agree but the updates do not: the gradient or the rate is scaled by the number of ranks",
        "take the mean over all samples, not the sum over ranks; scale the rate with lr.rule, which follows the batch",
    ),
    "steps": (
        "the runs do not take the same number of steps: the world size decides how often the loop runs",
        "let `paceline.Batches` count the steps: its epochs are the same in every world",
    ),
    "summation": (
        "the order of summation: the difference is of the size of rounding, and samples and randomness agree",
        "set exact=true, and let `paceline.parallelize` sum the gradients",
    ),
}


@dataclass(frozen=True)
class Difference:
    """Where two runs part."""

    world: int
    step: int
    tensor: str
    largest: float
    relative: float
    cause: str


@dataclass(frozen=True)
class VerifyResult:
    """The answer of verify."""

    same: bool
    script: str
    worlds: list[int]
    steps: int
    tensors: int
    digests: dict[int, str]
    tolerance: float = 0.0
    largest_relative: float = 0.0
    difference: Difference | None = None


def as_dict(verdict: VerifyResult) -> dict[str, Any]:
    """Return the verdict as plain values, the cause with its words."""
    found = asdict(verdict)
    if verdict.difference:
        cause, fix = CAUSES[verdict.difference.cause]
        found["difference"] |= {"likely_cause": cause, "fix": fix}
    return found


def describe(verdict: VerifyResult) -> str:
    """Return the verdict in words."""
    rows = [
        f"  {world} rank{'s' if world > 1 else ' '}  {digest[:16]}"
        for world, digest in verdict.digests.items()
    ]
    head = f"{verdict.script}: {verdict.steps} steps, {verdict.tensors} tensors of weights and optimizer state, and the losses"
    if verdict.difference:
        return "\n".join([head, *rows, _describe_difference(verdict, verdict.difference)])
    if verdict.tolerance:
        return "\n".join(
            [
                head,
                *rows,
                f"within tolerance: exact=false, largest relative difference {verdict.largest_relative:.1e} (allowed {verdict.tolerance:.0e})",
            ]
        )
    return "\n".join([head, *rows, "the same bits"])


def _describe_difference(verdict: VerifyResult, difference: Difference) -> str:
    cause, fix = CAUSES[difference.cause]
    where = "before the first step" if difference.step == 0 else f"step {difference.step}"
    return (
        f"not the same: world {difference.world} differs from world {verdict.worlds[0]}\n"
        f"  first difference: {where}, {difference.tensor}\n"
        f"  size: up to {difference.largest:.3g}, relative {difference.relative:.3g}\n"
        f"  likely cause: {cause}\n"
        f"  fix: {fix}"
    )
