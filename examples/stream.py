"""Train on a stream of samples without numbers: one shard per lane, on any number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "stream"


def readings(shard: int, shards: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one shard of 1,000 sensor readings: every `shards`-th one. It starts again when it ends."""
    for number in range(shard, 1000, shards):
        draw = torch.Generator().manual_seed(number)
        features = torch.randn(8, generator=draw)
        noise = 0.01 * torch.randn(8)  # from the generators that the run seeds for every sample
        yield features + noise, features.sin().sum(0, keepdim=True)


def main(config: Config) -> None:
    """Train for a number of steps: the stream has no epochs."""
    with paceline.Run(config) as run:
        model = run.model(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in run.steps(paceline.Stream(readings), steps=40):
            found = run.update(optimizer, lambda batch: mse_loss(model(batch[0]), batch[1]), step)
            if (step.index + 1) % 10 == 0:
                run.print(f"step {step.index + 1}: loss {found:.4f}")


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
