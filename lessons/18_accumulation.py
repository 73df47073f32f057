"""Lesson 18: gradient accumulation, and out of memory.

What forward keeps for backward grows with the batch. If it does not fit, the batch is cut into parts: each
goes forward and backward by itself, and the gradients add up. The loss of a part counts by its share, so
that their sum is that of the whole batch. BatchNorm would see the parts, not the batch. With DDP all but the
last part belong within `model.no_sync()`, or the gradients travel with every part.

    python lessons/18_accumulation.py 1    fails: the whole batch is out of memory, of a budget set in this file
    python lessons/18_accumulation.py 4    in four parts: a quarter of the memory, the curve of lesson 2

Expect: an error; then nearly the losses of lesson 2, with about a quarter of the bytes kept. Nearly, for parts
are rounded where the whole was not.
Time: about 11 s on 2 cores.
New since lesson 2: `Ledger` and `BUDGET_BYTES`, and the parts in `main`.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.recipes.digits import (
    embedded_digits,
)  # 1,797 digits that come with the package: nothing to download

EPOCHS, BATCH, RATE = 3, 64, 0.05
BUDGET_BYTES = 1_000_000  # what forward may keep for backward, as if the device were small


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


class Ledger:
    """Counts what forward keeps for backward; more than the budget is an error, as on a full GPU."""

    def __init__(self, budget: int) -> None:
        self.budget, self.held, self.most = budget, 0, 0

    def keep(self, value: Tensor) -> Tensor:
        """Count a tensor that is kept."""
        self.held += value.nbytes
        self.most = max(self.most, self.held)
        if self.held > self.budget:
            raise MemoryError(
                f"out of memory: forward keeps more than {self.budget:,} bytes for backward"
            )
        return value

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Count all that is kept from now on."""
        self.held = 0
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda value: value)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of digits that the model reads right."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    (images, labels), held_out = embedded_digits()
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    parts, ledger = int((sys.argv[1:] or ["4"])[0]), Ledger(BUDGET_BYTES)
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            for part in batch.split(-(-len(batch) // parts)):
                with ledger.watch():
                    loss = cross_entropy(model(images[part].to(device)), labels[part].to(device))
                (
                    loss * len(part) / len(batch)
                ).backward()  # the gradients of all parts add up to those of the batch
                total += loss.item() * len(part)
            optimizer.step()
        print(
            f"epoch {epoch + 1}: loss {total / len(images):.4f}, kept for backward {ledger.most:,} bytes"
        )
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"accuracy {accuracy(model, test_images, test_labels):.3f}")


if __name__ == "__main__":
    main()
