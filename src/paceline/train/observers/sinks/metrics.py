"""Names and values of the metrics that loggers get from an event."""

from __future__ import annotations

import math

from paceline.events import EpochDone, StepDone


def step_metrics(event: StepDone) -> dict[str, float]:
    """Return the metrics of a step.

    >>> step_metrics(StepDone(step=2, epoch=1, samples=64, loss=0.5, lr=0.1, samples_per_s=9.0))
    {'train/loss': 0.5, 'train/lr': 0.1, 'train/samples_per_s': 9.0, 'train/epoch': 1.0, 'train/samples': 64.0}
    """
    metrics = {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/samples_per_s": event.samples_per_s,
        "train/epoch": float(event.epoch),
        "train/samples": float(event.samples),
    }
    if event.mfu:
        metrics["train/mfu"] = event.mfu
    return metrics


def epoch_metrics(event: EpochDone) -> dict[str, float]:
    """Return the metrics of an epoch and of the evaluation after it.

    >>> epoch_metrics(EpochDone(epoch=1, epochs=2, step=4, loss=0.5, samples_per_s=9.0, metrics={"acc": 0.75}))
    {'epoch/loss': 0.5, 'epoch/samples_per_s': 9.0, 'eval/acc': 0.75}
    """
    metrics = {"epoch/loss": event.loss, "epoch/samples_per_s": event.samples_per_s}
    for name, value in event.metrics.items():
        metrics[f"eval/{name.removeprefix('eval_')}"] = value
    return metrics


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics without inf and nan, which some services refuse."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
