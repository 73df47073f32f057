"""Train a DCGAN on digits: two models, two optimizers, two updates per step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import paceline
from paceline.recipes.digits import embedded_digits

NOISE = 32


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "dcgan"


def generator() -> nn.Sequential:
    """Return a model that turns [samples, NOISE, 1, 1] into images of 28x28."""
    first = nn.ConvTranspose2d(NOISE, 16, 7, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, *second, nn.ConvTranspose2d(8, 1, 4, 2, 1))


def discriminator() -> nn.Sequential:
    first = nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2)
    second = nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)
    return nn.Sequential(*first, *second, nn.Conv2d(16, 1, 7), nn.Flatten())


def main(config: Config) -> None:
    (images, _), _ = embedded_digits()
    with paceline.Run(config) as run:
        make = run.model(generator(), name="generator")
        judge = run.model(discriminator(), name="discriminator")
        g_optimizer = run.optimizer(torch.optim.Adam(make.parameters(), 2e-3, (0.5, 0.999)))
        d_optimizer = run.optimizer(torch.optim.Adam(judge.parameters(), 1e-3, (0.5, 0.999)))

        def verdict(batch: Tensor, truth: float) -> Tensor:
            scores = judge(batch)
            return binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))

        def d_loss(batch: tuple[Tensor]) -> Tensor:
            noise = torch.randn(len(batch[0]), NOISE, 1, 1, device=run.device)
            return verdict(batch[0], 1.0) + verdict(make(noise).detach(), 0.0)

        def g_loss(batch: tuple[Tensor]) -> Tensor:
            noise = torch.randn(len(batch[0]), NOISE, 1, 1, device=run.device)
            return verdict(make(noise), 1.0)

        for step in run.steps((images,), epochs=2):
            d = run.update(d_optimizer, d_loss, step)
            run.log(d=d, g=run.update(g_optimizer, g_loss, step))


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
