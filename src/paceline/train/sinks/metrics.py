"""Which numbers of an event a logger keeps, and under which names."""

from __future__ import annotations

import math

from paceline.events import EpochDone, StepDone


def step_metrics(event: StepDone) -> dict[str, float]:
    """Return the numbers of a step.

    >>> step_metrics(StepDone(step=2, epoch=1, samples=64, loss=0.5, lr=0.1, samples_per_s=9.0))
    {'train/loss': 0.5, 'train/lr': 0.1, 'train/samples_per_s': 9.0, 'train/epoch': 1.0, 'train/samples': 64.0}
    """
    found = {"loss": event.loss, "lr": event.lr, "samples_per_s": event.samples_per_s}
    found |= {"epoch": float(event.epoch), "samples": float(event.samples)}
    return {
        f"train/{name}": value
        for name, value in (found | ({"mfu": event.mfu} if event.mfu else {})).items()
    }


def epoch_metrics(event: EpochDone) -> dict[str, float]:
    """Return the numbers of an epoch and of the evaluation after it.

    >>> epoch_metrics(EpochDone(epoch=1, epochs=2, step=4, loss=0.5, samples_per_s=9.0, metrics={"acc": 0.75}))
    {'epoch/loss': 0.5, 'epoch/samples_per_s': 9.0, 'eval/acc': 0.75}
    """
    found = {"epoch/loss": event.loss, "epoch/samples_per_s": event.samples_per_s}
    return found | {
        f"eval/{name.removeprefix('eval_')}": value for name, value in event.metrics.items()
    }


def finite(figures: dict[str, float]) -> dict[str, float]:
    """Return only those that are numbers: some services take no others."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}
