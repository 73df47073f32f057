"""The mistake: each rank shuffles its own share of the data, with a seed that holds its rank."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.train.observers.recorder import Recorder
from paceline.world.collectives import sum_across
from paceline.world.process_group import join

BATCH = 16


def main(config: paceline.RunConfig) -> None:
    with join(config) as world:
        features, targets = torch.randn(128, 8), torch.randn(128, 1)
        plain = nn.Linear(8, 1)
        model = DistributedDataParallel(plain) if world.size > 1 else plain
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = torch.arange(world.rank, 128, world.size)
        order = mine[
            torch.randperm(
                len(mine), generator=torch.Generator().manual_seed(config.seed + world.rank)
            )
        ]
        recorder = Recorder(config, world)
        recorder.start(plain, optimizer)
        for step, rows in enumerate(order.split(BATCH // world.size), start=1):
            batch = features[rows], targets[rows]
            loss = mse_loss(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = sum_across(world, loss.detach()) / world.size
            if recorder.step(step, float(mean), plain, optimizer, [batch]):
                break


if __name__ == "__main__":
    main(paceline.config_from_argv())
