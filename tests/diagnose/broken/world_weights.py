"""The mistake: the model is built from a seed that holds the number of ranks; DDP then spreads those weights faithfully."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import paceline


def main(config: paceline.RunConfig) -> None:
    with paceline.join(config) as world:
        data = torch.randn(512, 8), torch.randn(512, 1)
        torch.manual_seed(config.seed * world.size + world.size)
        model = paceline.parallelize(nn.Linear(8, 1), world, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        paceline.Trainer(world, model, optimizer, paceline.Batches(data, config, world), mse_loss, config).run()


if __name__ == "__main__":
    main(paceline.config_from_argv())
