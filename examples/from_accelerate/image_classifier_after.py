"""Classify digits: a DataLoader, OneCycleLR, and the accuracy after every epoch."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.recipes.digits import embedded_digits

EPOCHS, BATCH = 5, 64


def classifier() -> nn.Sequential:
    layers = nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(576, 10))


def main(config: paceline.RunConfig) -> None:
    with paceline.Run(config) as run:
        train, test = (TensorDataset(*digits) for digits in embedded_digits())
        loader = DataLoader(train, batch_size=BATCH, shuffle=True)
        test_loader = DataLoader(test, batch_size=BATCH)
        model = run.model(classifier())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        scheduler = OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * len(loader))
        run.track(scheduler=scheduler)

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return {"acc": (model(batch[0]).argmax(1) == batch[1]).float()}

        for step in run.steps(loader, epochs=EPOCHS):
            run.update(optimizer, lambda batch: cross_entropy(model(batch[0]), batch[1]), step)
            scheduler.step()
            if step.ends_epoch:
                run.evaluate(test_loader, score)


if __name__ == "__main__":
    main(paceline.config_from_argv())
