"""The mistake: each rank seeds with its rank before it builds the model, and nobody sends the weights of rank 0 around."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.train.observers.recorder import Recorder
from paceline.world.collectives import sum_across
from paceline.world.process_group import join


def main(config: paceline.RunConfig) -> None:
    with join(config) as world:
        features, targets = torch.randn(128, 8), torch.randn(128, 1)
        torch.manual_seed(config.seed + world.rank)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(config, world)
        recorder.start(model, optimizer)
        for step, rows in enumerate(torch.arange(128).split(16), start=1):
            mine = rows.chunk(world.size)[world.rank]
            loss = mse_loss(model(features[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = sum_across(world, parameter.grad) / world.size
            optimizer.step()
            mean = sum_across(world, loss.detach()) / world.size
            if recorder.step(
                step, float(mean), model, optimizer, [(features[mine], targets[mine])]
            ):
                break


if __name__ == "__main__":
    main(paceline.config_from_argv())
