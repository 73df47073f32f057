"""Lesson 13: Spawn processes from Python.

One program starts its own processes, as many as you ask for; if there are as many GPUs, each process
uses one. They meet through a file with a private name: there is no port to agree on, so two of these
programs on one machine never mix.

    python lessons/13_spawn.py 6 2 2    six epochs, saved every two, two processes

Expect: the losses of both ranks; only rank 0 writes lesson-13.pt.
Time: about 9 s on 2 cores.
New since lesson 12: `work`, and `main` starts it; `Trainer` wraps the model, uses its share of the
samples, and saves on rank 0.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

BATCH, RATE, FILE = 32, 0.05, Path("lesson-13.pt")


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


def work(rank: int, size: int, rendezvous: str, epochs: int, save_every: int) -> None:
    """Run as one rank: join through a file, train, leave."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= size:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    Trainer(device, save_every, rank, size).train(epochs)
    dist.destroy_process_group()


def main() -> None:
    """Start as many processes as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=6)
    parser.add_argument("save_every", type=int, nargs="?", default=2)
    parser.add_argument("processes", type=int, nargs="?", default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"
        passed = arguments.processes, rendezvous, arguments.epochs, arguments.save_every
        torch.multiprocessing.spawn(work, passed, nprocs=arguments.processes)


if __name__ == "__main__":
    main()
