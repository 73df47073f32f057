"""Take over an existing DataLoader: its batch size, sampler, collate_fn and workers."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import paceline
from paceline.recipes.digits import Digits, embedded_digits

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "dataloader"


class NoisyDigits(Dataset[Sample]):
    """Digits, with noise that is drawn when a sample is read."""

    def __init__(self, digits: Digits) -> None:
        self.images, self.labels = digits

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> Sample:
        image = self.images[number]
        return image + 0.1 * torch.randn_like(image), self.labels[number]


def main(config: Config) -> None:
    """Train on samples in which the digit 0 is as frequent as all others together."""
    train, test = map(NoisyDigits, embedded_digits())
    weights = torch.where(train.labels == 0, 9.0, 1.0).tolist()
    sampler = WeightedRandomSampler(weights, num_samples=600)
    loader = DataLoader(train, batch_size=100, sampler=sampler, num_workers=1)
    with paceline.Run(config) as run:
        layers = nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)
        model = run.model(nn.Sequential(*layers))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))

        def score(batch: Sample) -> dict[str, Tensor]:
            return {"acc": (model(batch[0]).argmax(1) == batch[1]).float()}

        for step in run.steps(loader, epochs=3):
            run.update(optimizer, lambda batch: cross_entropy(model(batch[0]), batch[1]), step)
            if step.ends_epoch:
                run.evaluate(DataLoader(test, batch_size=100), score)


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
