"""Lesson 2: Train a network on one device.

This is the loop that all later lessons keep: forward, loss, backward, step. The digits come with the
package (`paceline data get mnist` downloads the 60,000 of MNIST, and `paceline train mnist data=mnist`
trains on them). A model with dropout or BatchNorm needs `model.eval()` before it is evaluated, and
`model.train()` afterwards.

    python lessons/02_cnn.py

Expect: the loss falls in each epoch; the accuracy on the held-out digits is above 0.9.
Time: about 7 s on 2 cores.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE = 3, 64, 0.05


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


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
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch + 1}: loss {total / len(images):.4f}")
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"accuracy {accuracy(model, test_images, test_labels):.3f}")


if __name__ == "__main__":
    main()
