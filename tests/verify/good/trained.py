"""A training that is the same in every world, for all that usually breaks it: dropout, BatchNorm, AdamW."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline


def main(config: paceline.RunConfig) -> None:
    with paceline.Run(config) as run:
        data = torch.randn(100, 8), torch.randint(3, (100,))
        plain = nn.Sequential(
            nn.Linear(8, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 3),
        )
        model = run.model(plain)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        paceline.Trainer(run, model, optimizer, data, cross_entropy).fit()


if __name__ == "__main__":
    main(paceline.config_from_argv())
