"""Learn from unlabelled digits by SimCLR: the negatives of a sample are all other samples of the step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import paceline
from paceline.recipes.digits import embedded_digits


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "simclr"


def augmented(images: Tensor) -> Tensor:
    """Return the images shifted by up to 3 pixels, with noise."""
    down, right = torch.randint(-3, 4, (2,)).tolist()
    return images.roll((down, right), (2, 3)) + 0.3 * torch.randn_like(images)


def nt_xent(rows: Tensor) -> Tensor:
    """Return the loss over the embeddings of all samples of the step, [samples, 2, width], in sample order."""
    first, second = normalize(rows[:, 0]), normalize(rows[:, 1])
    return cross_entropy(first @ second.T / 0.2, torch.arange(len(rows), device=rows.device))


def main(config: Config) -> None:
    """Train, then name the test digits after their nearest neighbours among the training digits."""
    (images, labels), (test_images, test_labels) = embedded_digits()
    with paceline.Run(config) as run:
        block = nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2)
        encoder = nn.Sequential(*block, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 64))
        run.model(encoder)
        optimizer = run.optimizer(torch.optim.SGD(encoder.parameters(), 0.1, momentum=0.9))

        def embed(batch: tuple[Tensor]) -> Tensor:
            views = torch.cat([augmented(batch[0]), augmented(batch[0])])
            return torch.stack(encoder(views).chunk(2), dim=1)

        def features(batch: tuple[Tensor]) -> Tensor:
            return normalize(encoder(batch[0]))

        for step in run.steps((images,), epochs=3):
            run.update(optimizer, embed, step, over_batch=nt_xent)

        known, asked = run.predict((images,), features), run.predict((test_images,), features)
        nearest = labels[(asked @ known.T).argmax(1)]
        run.print(f"nearest neighbour: {(nearest == test_labels).float().mean():.1%} correct")


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
