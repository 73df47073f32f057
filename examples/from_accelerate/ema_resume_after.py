"""Average the weights (EMA), save the state of the training, and resume from it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.recipes.digits import embedded_digits

EPOCHS, BATCH = 5, 64


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def main(config: paceline.RunConfig) -> None:
    with paceline.Run(config) as run:
        train, test = (TensorDataset(*digits) for digits in embedded_digits())
        loader = DataLoader(train, batch_size=BATCH, shuffle=True)
        test_loader = DataLoader(test, batch_size=BATCH)
        model = classifier()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = run.optimizer(torch.optim.AdamW(run.model(model).parameters(), lr=3e-3))
        run.track(ema=ema)

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return {"acc": (ema(batch[0]).argmax(1) == batch[1]).float()}

        for step in run.steps(loader, epochs=EPOCHS):
            run.update(optimizer, lambda batch: cross_entropy(model(batch[0]), batch[1]), step)
            ema.update_parameters(model)
            if step.ends_epoch:
                run.evaluate(test_loader, score)


if __name__ == "__main__":
    main(paceline.config_from_argv())
