"""Lesson 12: A training program for one device.

The smallest complete training program: data, model, a class that trains, and a checkpoint that is
written now and then. Lessons 13 to 16 extend it.

    python lessons/12_single_device.py 6 2    six epochs, saved every two

Expect: the loss falls to 0.01, and lesson-12.pt is written three times.
Time: about 5 s on 2 cores.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

BATCH, RATE, FILE = 32, 0.05, Path("lesson-12.pt")


def make_samples() -> tuple[Tensor, Tensor]:
    """Return 2,048 samples: 20 features, and a target that is linear in them plus noise."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2048, 20, generator=generator)
    weights = torch.randn(20, 1, generator=generator)
    return features, features @ weights + 0.1 * torch.randn(2048, 1, generator=generator)


class Trainer:
    """Trains a model and saves it every few epochs."""

    def __init__(self, device: torch.device, save_every: int) -> None:
        torch.manual_seed(0)
        self.save_every = save_every
        self.features, self.targets = (part.to(device) for part in make_samples())
        self.model = nn.Linear(20, 1).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def train(self, epochs: int) -> None:
        """Run all epochs."""
        for epoch in range(epochs):
            loss = self.run_epoch(epoch)
            print(f"epoch {epoch + 1}: loss {loss:.4f}")
            if (epoch + 1) % self.save_every == 0:
                torch.save(self.model.state_dict(), FILE)
                print(f"epoch {epoch + 1}: saved {FILE}")

    def run_epoch(self, epoch: int) -> float:
        """See every sample once; return the mean loss."""
        total = 0.0
        order = torch.randperm(len(self.features), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            loss = mse_loss(self.model(self.features[batch]), self.targets[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(batch)
        return total / len(order)


def main() -> None:
    """Train as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=6)
    parser.add_argument("save_every", type=int, nargs="?", default=2)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    Trainer(device, arguments.save_every).train(arguments.epochs)


if __name__ == "__main__":
    main()
