"""Lesson 14: torchrun.

The program no longer starts processes: an agent does, watches them, and tells each who it is. So the same
file serves for one machine and for many. A rank that dies ends the others of its node; those of other nodes
fail in the next collective that it does not come to.

    torchrun --standalone --nproc-per-node 2 lessons/14_torchrun.py 6 2
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 lessons/14_torchrun.py 6 2

Expect: as in lesson 13; with the second line, typed on each of two nodes, from four ranks.
Time: about 25 s on 2 cores.
New since lesson 13: `main` asks the environment, and `work` is gone.
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
    """Return 2,048 samples whose target is a linear function of their 20 features, plus a little noise."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2048, 20, generator=generator)
    weights = torch.randn(20, 1, generator=generator)
    return features, features @ weights + 0.1 * torch.randn(2048, 1, generator=generator)


class Trainer:
    """Trains a model, and saves it every so many epochs."""

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
            if (
                self.rank == 0 and (epoch + 1) % self.save_every == 0
            ):  # all have the same weights: one writes them
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
    """Be one of the processes that torchrun starts: it tells each who it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=6)
    parser.add_argument("save_every", type=int, nargs="?", default=2)
    words = parser.parse_args()
    rank, size, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    device = (
        torch.device("cuda", local_rank)
        if torch.cuda.device_count() >= here
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    Trainer(device, words.save_every, rank, size).train(words.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
