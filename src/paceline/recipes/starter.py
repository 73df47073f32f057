"""Train a digit classifier. Replace the three marked places with your model, your data and your loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline
from paceline.recipes.digits import embedded_digits

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    """Settings of this training: `name=value` on the command line. Add your own fields here."""

    name: str = "starter"


# 1. The model: any torch.nn.Module.
def make_model() -> nn.Module:
    """Return the model with random weights; the seed of the run is set already."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


# 2. The data: tensors, a map-style dataset, a DataLoader, shards or a stream.
def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test dataset, the same on every rank: they are divided later."""
    train, test = embedded_digits()
    return TensorDataset(*train), TensorDataset(*test)


# 3. The loss: the mean over the samples of a batch, or (sum, count).
def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of one lane, which is a part of the global batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return metrics with one value per sample."""
    images, labels = batch
    return {"acc": (model(images).argmax(1) == labels).float()}


def main(config: Config) -> None:
    """Train; started again, it resumes from the newest checkpoint."""
    train, test = make_data()
    with paceline.Run(config) as run:
        model = run.model(make_model())
        rate = paceline.scaled_lr(config)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=rate))
        for step in run.steps(train):
            run.update(optimizer, lambda batch: loss_of(model, batch), step)
            if step.ends_epoch:
                run.evaluate(test, lambda batch: score(model, batch))


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
