"""Classify digits: a DataLoader, OneCycleLR, and the accuracy after every epoch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.recipes.digits import embedded_digits

EPOCHS, BATCH = 5, 64


def classifier() -> nn.Sequential:
    layers = nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(576, 10))


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    train, test = (TensorDataset(*digits) for digits in embedded_digits())
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(test, batch_size=BATCH)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * len(loader))
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )

    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        model.eval()
        right = []
        for images, labels in test_loader:
            with torch.no_grad():
                found = model(images).argmax(1) == labels
            right.append(accelerator.gather_for_metrics(found))
        accelerator.print(f"epoch {epoch + 1}: acc {torch.cat(right).float().mean():.4f}")


if __name__ == "__main__":
    main()
