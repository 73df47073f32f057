"""Lesson 18: Gradient accumulation.

The activations that forward keeps for backward grow with the batch. If they do not fit, split the
batch into micro-batches: each runs forward and backward alone, and the gradients add up. Weight the
loss of each micro-batch by its share, so that the sum is that of the whole batch. BatchNorm would see
micro-batches, not the batch. With DDP, run all but the last one under `model.no_sync()`, or the
gradients are exchanged every time.

    python lessons/18_accumulation.py 1    fails: the batch exceeds the memory budget set in this file
    python lessons/18_accumulation.py 4    in four parts: a quarter of the memory, the same curve

Expect: an error; then nearly the losses of lesson 2, with about a quarter of the bytes. Nearly,
because each part is rounded by itself.
Time: about 11 s on 2 cores.
New since lesson 2: `Ledger` and `BUDGET_BYTES`, and the micro-batches in `main`.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE = 3, 64, 0.05
BUDGET_BYTES = 1_000_000  # for what forward keeps for backward, as if the device were small


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


class Ledger:
    """Counts what forward keeps for backward; more than the budget is an error."""

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
        """Start counting."""
        self.held = 0
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda value: value)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of digits that the model classifies correctly."""
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
                (loss * len(part) / len(batch)).backward()  # gradients add up over the parts
                total += loss.item() * len(part)
            optimizer.step()
        print(
            f"epoch {epoch + 1}: loss {total / len(images):.4f}, kept for backward {ledger.most:,} bytes"
        )
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"accuracy {accuracy(model, test_images, test_labels):.3f}")


if __name__ == "__main__":
    main()
