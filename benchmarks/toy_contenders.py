"""What does one rank of each contender do? The same toy training, written the way each library wants it.

Run by toy_loop.py as `toy_contenders.py NAME EPOCHS FROM_STEP TO_STEP FOLDER`. Every contender calls the same loss once a
step, and that loss keeps the time, so all are measured at the same two places. Imports stand where they are
needed: what a contender does not import, its start-up does not pay for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

SAMPLES, FEATURES, BATCH, RATE = 2048, 20, 32, 0.01
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MINE = BATCH // WORLD

Loss = Callable[[Tensor, Tensor], Tensor]


class Stopwatch:
    """Mean squared error that notes the clocks when it is called for two chosen steps, counted from 0."""

    def __init__(self, begin: int, end: int) -> None:
        self._places = {begin, end}
        self._calls = 0
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        if self._calls in self._places:
            self.cpu_s.append(time.process_time())
            self.wall_s.append(time.time())
        self._calls += 1
        return mse_loss(outputs, target)


def samples() -> tuple[Tensor, Tensor]:
    """Return the samples of Paceline's toy recipe."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    return features, features @ weights + 0.1 * torch.randn(SAMPLES, 1, generator=generator)


class Indexed:
    """This rank's batches of one epoch: a shuffled order, and the tensors indexed with pieces of it."""

    def __init__(self) -> None:
        self._features, self._target = samples()
        self._generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(SAMPLES, generator=self._generator)
        for start in range(RANK * MINE, SAMPLES, BATCH):
            rows = order[start : start + MINE]
            yield self._features[rows], self._target[rows]

    def __len__(self) -> int:
        return SAMPLES // BATCH


class Gathered(Indexed):
    """The same batches, with the tensors indexed once an epoch and then cut."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = (
            torch.randperm(SAMPLES, generator=self._generator)
            .view(-1, WORLD, MINE)[:, RANK]
            .flatten()
        )
        yield from zip(
            self._features[rows].split(MINE), self._target[rows].split(MINE), strict=True
        )


def loader(*, split: bool = True) -> Iterable[Any]:
    """Return the usual DataLoader over tensors in memory; `split` gives each rank its own part."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(*samples())
    sampler = DistributedSampler(data, WORLD, RANK) if WORLD > 1 and split else None
    return DataLoader(data, batch_size=MINE, sampler=sampler, shuffle=sampler is None)


def train_by_hand(batches: Iterable[Any], epochs: int, loss: Loss) -> None:
    """Train with nothing but torch."""
    model: nn.Module = nn.Linear(FEATURES, 1)
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(epochs):
        for features, target in batches:
            optimizer.zero_grad()
            loss(model(features), target).backward()
            optimizer.step()


def train_with_paceline(epochs: int, loss: Loss, runs: Path, *, exact: bool) -> None:
    """Train the toy recipe itself, events and console on; only its loss is replaced by the one that keeps time."""
    from paceline.config import BatchConfig
    from paceline.recipes import toy

    vars(toy).update(mse_loss=loss)
    toy.main(
        toy.ToyConfig(
            epochs=epochs, exact=exact, runs=str(runs), batch=BatchConfig(BATCH, lanes=WORLD)
        )
    )


def train_with_fabric(batches: Iterable[Any], epochs: int, loss: Loss) -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy: Any = (
        DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
        if WORLD > 1
        else "auto"
    )
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    fabric.launch()
    plain = nn.Linear(FEATURES, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=RATE))
    if not isinstance(batches, Indexed):
        batches = fabric.setup_dataloaders(batches, use_distributed_sampler=False)
    for _ in range(epochs):
        for features, target in batches:
            optimizer.zero_grad()
            fabric.backward(loss(model(features), target))
            optimizer.step()


def train_with_accelerate(batches: Iterable[Any], epochs: int, loss: Loss) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    plain = nn.Linear(FEATURES, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=RATE))
    if not isinstance(batches, Indexed):
        batches = accelerator.prepare_data_loader(batches)  # this splits it
    for _ in range(epochs):
        for features, target in batches:
            optimizer.zero_grad()
            accelerator.backward(loss(model(features), target))
            optimizer.step()


def train_with_lightning(batches: Iterable[Any], epochs: int, loss: Loss) -> None:
    """Train with Lightning's Trainer, everything that can be switched off switched off."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, 1)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return loss(self.linear(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    strategy: Any = (
        DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
        if WORLD > 1
        else "auto"
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(Module(), batches)


CONTENDERS: dict[str, Callable[[int, Loss, Path], None]] = {
    "hand": lambda epochs, loss, _: train_by_hand(Indexed(), epochs, loss),
    "hand-gathered": lambda epochs, loss, _: train_by_hand(Gathered(), epochs, loss),
    "paceline": lambda epochs, loss, folder: train_with_paceline(epochs, loss, folder, exact=True),
    "paceline-free": lambda epochs, loss, folder: train_with_paceline(
        epochs, loss, folder, exact=False
    ),
    "fabric": lambda epochs, loss, _: train_with_fabric(Indexed(), epochs, loss),
    "fabric-loader": lambda epochs, loss, _: train_with_fabric(loader(), epochs, loss),
    "accelerate": lambda epochs, loss, _: train_with_accelerate(Indexed(), epochs, loss),
    "accelerate-loader": lambda epochs, loss, _: train_with_accelerate(
        loader(split=False), epochs, loss
    ),
    "lightning": lambda epochs, loss, _: train_with_lightning(Indexed(), epochs, loss),
    "lightning-loader": lambda epochs, loss, _: train_with_lightning(loader(), epochs, loss),
}


def meet(folder: Path) -> None:
    """Form the process group before the library does: all accept one that is there, and a file opens no port."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "meeting"), WORLD), rank=RANK, world_size=WORLD
    )
    # Fabric and Lightning tell from these that the ranks were started for them.
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "toy",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "GROUP_RANK": "0",
    }


def main(name: str, epochs: int, begin: int, end: int, folder: Path) -> None:
    """Train, and leave the clock readings of this rank in the folder."""
    torch.set_num_threads(1)
    if WORLD > 1 and not name.startswith("paceline"):
        meet(folder)
    watch = Stopwatch(begin, end)
    CONTENDERS[name](epochs, watch, folder)
    (folder / f"rank-{RANK}.json").write_text(
        json.dumps({"cpu_s": watch.cpu_s, "wall_s": watch.wall_s})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
