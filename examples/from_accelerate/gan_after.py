"""Train a GAN on digits: two models and two optimizers."""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.recipes.digits import embedded_digits

EPOCHS, BATCH, NOISE = 5, 64, 32


def generator() -> nn.Sequential:
    layers = nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 784)
    return nn.Sequential(*layers, nn.Unflatten(1, (1, 28, 28)))


def discriminator() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def noise_for(images: Tensor) -> Tensor:
    return torch.randn(len(images), NOISE, device=images.device)


def main(config: paceline.RunConfig) -> None:
    with paceline.Run(config) as run:
        (images, _), _ = embedded_digits()
        loader = DataLoader(TensorDataset(images), batch_size=BATCH, shuffle=True)
        make = run.model(generator(), name="generator")
        judge = run.model(discriminator(), name="discriminator")
        g_optimizer = run.optimizer(torch.optim.Adam(make.parameters(), 1e-3, (0.5, 0.999)))
        d_optimizer = run.optimizer(torch.optim.Adam(judge.parameters(), 5e-4, (0.5, 0.999)))

        def d_loss(batch: tuple[Tensor]) -> Tensor:
            (real,) = batch
            fake = make(noise_for(real)).detach()
            return softplus(-judge(real)).mean() + softplus(judge(fake)).mean()

        def g_loss(batch: tuple[Tensor]) -> Tensor:
            return softplus(-judge(make(noise_for(batch[0])))).mean()

        for step in run.steps(loader, epochs=EPOCHS):
            d = run.update(d_optimizer, d_loss, step)
            run.log(d=d, g=run.update(g_optimizer, g_loss, step))


if __name__ == "__main__":
    main(paceline.config_from_argv())
