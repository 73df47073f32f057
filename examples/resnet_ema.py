"""Train a small ResNet on digits with mixup, OneCycleLR, and an average of the weights (EMA)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.recipes.digits import embedded_digits


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "resnet-ema"
    epochs: int = 3


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        first = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        self.block = nn.Sequential(*first, nn.Conv2d(width, width, 3, padding=1))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs + self.block(inputs))


def main(config: Config) -> None:
    train, test = embedded_digits()
    total_steps = config.epochs * -(-len(train[0]) // config.batch.global_size)
    with paceline.Run(config) as run:
        body = nn.Conv2d(1, 8, 3, 2), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(3)
        model = nn.Sequential(*body, nn.Flatten(), nn.Linear(72, 10))
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        optimizer = run.optimizer(torch.optim.AdamW(run.model(model).parameters()))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps)
        run.track(scheduler=scheduler, ema=ema)

        def mixup(batch: tuple[Tensor, Tensor]) -> Tensor:
            images, targets = batch[0], one_hot(batch[1], 10).float()
            share = torch.distributions.Beta(0.2, 0.2).sample().item()
            scores = model(images.lerp(images.flip(0), share))
            return cross_entropy(scores, targets.lerp(targets.flip(0), share))

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return {"acc": (ema(batch[0]).argmax(1) == batch[1]).float()}

        for step in run.steps(train):
            run.update(optimizer, mixup, step)
            scheduler.step()
            ema.update_parameters(model)
            if step.ends_epoch:
                run.evaluate(test, score)


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
