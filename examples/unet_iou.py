"""Find the digits in noise with a U-Net; the IoU is one ratio over the whole evaluation dataset."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as mean_entropy

import paceline
from paceline.recipes.digits import Digits, embedded_digits


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "unet-iou"


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
    return nn.Sequential(layer, nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = conv(1, 4), conv(4, 8, 2), conv(8, 16, 2)
        self.up_middle, self.up_top, self.head = conv(24, 8), conv(12, 4), nn.Conv2d(4, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        top, grow = self.top(images), nn.Upsample(scale_factor=2)
        middle = self.middle(top)
        below = self.up_middle(torch.cat([middle, grow(self.bottom(middle))], 1))
        return torch.as_tensor(self.head(self.up_top(torch.cat([top, grow(below)], 1))))


def noisy(digits: Digits) -> tuple[Tensor, Tensor]:
    """Return digits in noise, and which pixels belong to them."""
    noise = torch.randn(digits[0].shape, generator=torch.Generator().manual_seed(1))
    return digits[0] + noise, (digits[0] > 1).float()


def main(config: Config) -> None:
    train, test = map(noisy, embedded_digits())
    with paceline.Run(config) as run:
        model = run.model(UNet())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        def iou(batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
            found, truth = model(batch[0]) > 0, batch[1] > 0
            return {"iou": ((found & truth).sum(), (found | truth).sum())}

        for step in run.steps(train, epochs=2):
            run.update(optimizer, lambda batch: mean_entropy(model(batch[0]), batch[1]), step)
            if step.ends_epoch:
                run.evaluate(test, iou)


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
