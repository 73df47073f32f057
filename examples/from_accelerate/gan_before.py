"""Train a GAN on digits: two models and two optimizers."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from paceline.recipes.digits import embedded_digits

EPOCHS, BATCH, NOISE = 5, 64, 32


def generator() -> nn.Sequential:
    layers = nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 784)
    return nn.Sequential(*layers, nn.Unflatten(1, (1, 28, 28)))


def discriminator() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def noise_for(images: Tensor) -> Tensor:
    return torch.randn(len(images), NOISE, device=images.device)


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    (images, _), _ = embedded_digits()
    loader = DataLoader(TensorDataset(images), batch_size=BATCH, shuffle=True)
    make = generator()
    judge = discriminator()
    g_optimizer = torch.optim.Adam(make.parameters(), 1e-3, (0.5, 0.999))
    d_optimizer = torch.optim.Adam(judge.parameters(), 5e-4, (0.5, 0.999))
    make, judge, g_optimizer, d_optimizer, loader = accelerator.prepare(
        make, judge, g_optimizer, d_optimizer, loader
    )

    for epoch in range(EPOCHS):
        for (real,) in loader:
            fake = make(noise_for(real)).detach()
            d_loss = softplus(-judge(real)).mean() + softplus(judge(fake)).mean()
            d_optimizer.zero_grad()
            accelerator.backward(d_loss)
            d_optimizer.step()
            g_loss = softplus(-judge(make(noise_for(real)))).mean()
            g_optimizer.zero_grad()
            accelerator.backward(g_loss)
            g_optimizer.step()
        losses = accelerator.gather(torch.stack([d_loss, g_loss]).detach()).view(-1, 2).mean(0)
        accelerator.print(f"epoch {epoch + 1}: d {losses[0]:.4f}, g {losses[1]:.4f}")


if __name__ == "__main__":
    main()
