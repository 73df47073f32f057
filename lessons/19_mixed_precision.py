"""Lesson 19: Mixed precision.

Matrix products are computed in 16 bits; weights and sums stay in 32. bf16 has the range of fp32 and
needs nothing else; fp16 has more digits, but small gradients underflow, so the loss is scaled up
before backward and the gradients are scaled down before the update.

    python lessons/19_mixed_precision.py         fp32
    python lessons/19_mixed_precision.py bf16    twice as fast or more on a GPU with a larger model
    python lessons/19_mixed_precision.py fp16    with a gradient scaler

Expect: three curves that stay close together. On a CPU it is slower, not faster; a CPU without 16-bit
support prints a warning.
Time: about 22 s on 2 cores.
New since lesson 2: autocast, the scaler, and clipping in `main`; another `make_model`.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE = 3, 64, 0.05


def make_model() -> nn.Module:
    """Return a smaller network: many CPUs are a hundred times slower in 16 bits than in 32."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))


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
    kind = torch.bfloat16 if "bf16" in sys.argv else torch.float16 if "fp16" in sys.argv else None
    scaler = torch.amp.GradScaler(device.type, enabled=kind == torch.float16)
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(images)).split(BATCH):
            with torch.autocast(device.type, kind, enabled=kind is not None):
                loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # below 6e-8, fp16 gradients would become 0
            scaler.unscale_(optimizer)  # before clipping: the limit is for unscaled gradients
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # skips a step with infinite or nan gradients
            scaler.update()
            total += loss.item() * len(batch)
        print(
            f"epoch {epoch + 1}: loss {total / len(images):.4f}, computed in {kind or torch.float32}"
        )
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"accuracy {accuracy(model, test_images, test_labels):.3f}")


if __name__ == "__main__":
    main()
