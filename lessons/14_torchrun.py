"""Lesson 14: Start processes with torchrun.

The program no longer starts processes: an agent does, watches them, and passes each one its rank.
So the same file works on one machine and on many. If a rank dies, its agent ends the other ranks of
that node; ranks on other nodes fail in their next collective.

    torchrun --standalone --nproc-per-node 2 lessons/14_torchrun.py 6 2
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 lessons/14_torchrun.py 6 2

Expect: the output of lesson 13; with the second command, typed on each of two nodes, from four ranks.
Time: about 25 s on 2 cores.
New since lesson 13: `main` reads the environment, and `work` is gone.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

BATCH, RATE, FILE = 32, 0.05, Path("lesson-14.pt")


def make_samples() -> tuple[Tensor, Tensor]:
    """Return 2,048 samples: 20 features, and a target that is linear in them plus noise."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2048, 20, generator=generator)
    weights = torch.randn(20, 1, generator=generator)
    return features, features @ weights + 0.1 * torch.randn(2048, 1, generator=generator)


class Trainer:
    """Trains a model and saves it every few epochs."""

    def __init__(self, device: torch.device, save_every: int, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.save_every, self.rank, self.size = save_every, rank, size
        self.features, self.targets = (part.to(device) for part in make_samples())
        self.model = DistributedDataParallel(nn.Linear(20, 1).to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def train(self, epochs: int) -> None:
        """Run all epochs."""
        for epoch in range(epochs):
            loss = self.run_epoch(epoch)
            print(f"rank {self.rank}, epoch {epoch + 1}: loss {loss:.4f}")
            if self.rank == 0 and (epoch + 1) % self.save_every == 0:  # all weights are equal
                torch.save(self.model.module.state_dict(), FILE)
                print(f"epoch {epoch + 1}: saved {FILE}")

    def run_epoch(self, epoch: int) -> float:
        """See every sample of this rank once; return the mean loss."""
        total = 0.0
        order = torch.randperm(len(self.features), generator=torch.Generator().manual_seed(epoch))
        order = order[self.rank :: self.size]
        for batch in order.split(BATCH // self.size):
            loss = mse_loss(self.model(self.features[batch]), self.targets[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(batch)
        return total / len(order)


def main() -> None:
    """Run as one of the processes that torchrun starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=6)
    parser.add_argument("save_every", type=int, nargs="?", default=2)
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    Trainer(device, arguments.save_every, rank, size).train(arguments.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
