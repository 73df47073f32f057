"""Train a linear model on a linear target: `paceline train toy [EPOCHS] [SAVE_EVERY]`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import mse_loss

import paceline
from paceline.config import BatchConfig, LrConfig, RunConfig

SAMPLES, FEATURES = 2048, 20


@dataclass(frozen=True)
class ToyConfig(RunConfig):
    """A linear model on 2,048 seeded samples of 20 features."""

    name: str = "toy"
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_size=32))
    lr: LrConfig = field(default_factory=lambda: LrConfig(base=0.01, reference_batch=32))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return features, and targets that are a linear function of them plus noise."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    return features, features @ weights + 0.1 * torch.randn(SAMPLES, 1, generator=generator)


def main(config: ToyConfig) -> None:
    """Train."""
    with paceline.Run(config) as run:
        model = run.model(torch.nn.Linear(FEATURES, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=paceline.scaled_lr(config))
        optimizer = run.optimizer(sgd)
        paceline.Trainer(run, model, optimizer, samples(), mse_loss).fit()


if __name__ == "__main__":
    main(paceline.config_from_argv(ToyConfig, positional=("epochs", "checkpoint.every")))
