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
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(8, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = torch.randn(512, 8), torch.randn(512, 1)
        paceline.Trainer(run, model, optimizer, data, noisy_loss).fit()


if __name__ == "__main__":
    main(paceline.config_from_argv())
