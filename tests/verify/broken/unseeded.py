"""The mistake: noise from a generator that is seeded by the system, so that no run can be repeated."""

import os

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

NOISE = torch.Generator().manual_seed(int.from_bytes(os.urandom(7)))


def noisy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs, targets + 0.1 * torch.randn(targets.shape, generator=NOISE))


def main(config: paceline.RunConfig) -> None:
    with paceline.join(config) as world:
        model = paceline.parallelize(nn.Linear(8, 1), world, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = paceline.Batches((torch.randn(512, 8), torch.randn(512, 1)), config, world)
        paceline.Trainer(world, model, optimizer, batches, noisy_loss, config).run()


if __name__ == "__main__":
    main(paceline.config_from_argv())
