"""The mistake, if it is one: everything is right, but an all-reduce adds in an order that depends on the number of ranks."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.train.observers.recorder import Recorder
from paceline.world.collectives import sum_across
from paceline.world.process_group import join


def main(config: paceline.RunConfig) -> None:
    with join(config) as world:
        features, targets = torch.randn(512, 32), torch.randn(512, 1)
        plain = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        model = DistributedDataParallel(plain) if world.size > 1 else plain
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        recorder = Recorder(config, world)
        recorder.start(plain, optimizer)
        for step, rows in enumerate(torch.arange(512).split(64), start=1):
            mine = rows.chunk(world.size)[world.rank]
            loss = mse_loss(model(features[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = sum_across(world, loss.detach()) / world.size
            if recorder.step(
                step, float(mean), plain, optimizer, [(features[mine], targets[mine])]
            ):
                break


if __name__ == "__main__":
    main(paceline.config_from_argv())
