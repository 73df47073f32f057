"""Average the weights (EMA), save the state of the training, and resume from it."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from paceline.recipes.digits import embedded_digits

EPOCHS, BATCH, STATE = 5, 64, Path("ema-state")


class Progress:
    def __init__(self) -> None:
        self.epoch, self.step = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    train, test = (TensorDataset(*digits) for digits in embedded_digits())
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(test, batch_size=BATCH)
    model = classifier()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    progress = Progress()
    accelerator.register_for_checkpointing(ema, progress)
    if STATE.exists():
        accelerator.load_state(str(STATE))

    for epoch in range(progress.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for images, labels in accelerator.skip_first_batches(loader, progress.step):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            ema.update_parameters(accelerator.unwrap_model(model))
            progress.step += 1
            if progress.step % 10 == 0:
                accelerator.save_state(str(STATE))
        progress.epoch, progress.step = epoch + 1, 0
        right = []
        for images, labels in test_loader:
            with torch.no_grad():
                found = ema(images).argmax(1) == labels
            right.append(accelerator.gather_for_metrics(found))
        accelerator.print(f"epoch {epoch + 1}: acc {torch.cat(right).float().mean():.4f}")
    accelerator.save_state(str(STATE))


if __name__ == "__main__":
    main()
