"""How does each contender train the same network on one GPU? 60,000 digits in batches of 128, the held-out ones after each epoch.

Run by mnist.py as `mnist_contenders.py NAME EPOCHS`; prints the seconds of each epoch but the first, evaluation included, and the
seconds of training alone. Digits are random: they take as long as real ones.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.recipes.mnist import Net

TRAIN, TEST, BATCH, RATE = 60_000, 10_000, 128, 1e-3
Clock = list[tuple[float, float]]
"""For each epoch: seconds of training, seconds of evaluation."""


def digits(count: int) -> tuple[Tensor, Tensor]:
    """Return random digits, the same for all."""
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, 1, 28, 28, generator=generator), torch.randint(
        0, 10, (count,), generator=generator
    )


def shuffled(data: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of tensors that lie on the GPU."""
    order = torch.randperm(len(data[1]), device=data[1].device)
    for rows in order.split(BATCH):
        yield data[0][rows], data[1][rows]


def accuracy(model: nn.Module, data: tuple[Tensor, ...]) -> float:
    """Return the share of held-out digits that are right."""
    model.eval()
    with torch.no_grad():
        pieces = zip(data[0].split(BATCH), data[1].split(BATCH), strict=True)
        right = torch.stack(
            [(model(images).argmax(1) == labels).sum() for images, labels in pieces]
        ).sum()
    model.train()
    return float(right) / len(data[1])


def in_epochs(epochs: int, train: Callable[[], None], evaluate: Callable[[], float]) -> Clock:
    """Train and evaluate, and keep the time."""
    clock = []
    for _ in range(epochs):
        begun = time.perf_counter()
        train()
        torch.cuda.synchronize()
        trained = time.perf_counter()
        evaluate()
        torch.cuda.synchronize()
        clock.append((trained - begun, time.perf_counter() - trained))
    return clock


def by_hand(epochs: int, batches: Callable[[], Iterable[Any]] | None = None) -> Clock:
    """Train with nothing but torch, eagerly."""
    data, held_out = [tuple(tensor.cuda() for tensor in digits(count)) for count in (TRAIN, TEST)]
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def train() -> None:
        for images, labels in batches() if batches else shuffled(data):
            optimizer.zero_grad()
            cross_entropy(
                model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True)
            ).backward()
            optimizer.step()

    return in_epochs(epochs, train, lambda: accuracy(model, held_out))


def captured_by_hand(epochs: int) -> Clock:
    """Train with the whole step in one CUDA graph: compiled, bf16, channels last. The short last batch is left out, 0.2 % of all."""
    data, held_out = [tuple(tensor.cuda() for tensor in digits(count)) for count in (TRAIN, TEST)]
    model = Net().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(RATE, device="cuda"), fused=True, capturable=True
    )
    images, labels = (tensor[:BATCH].clone() for tensor in data)
    forward = torch.compile(model, dynamic=False)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def train() -> None:
        order = torch.randperm(TRAIN, device="cuda")
        for rows in order[: TRAIN // BATCH * BATCH].split(BATCH):
            torch.index_select(data[0], 0, rows, out=images)
            torch.index_select(data[1], 0, rows, out=labels)
            graph.replay()

    return in_epochs(epochs, train, lambda: accuracy(model, held_out))


def with_accelerate(epochs: int) -> Clock:
    """Train with Accelerate, bf16."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    held_out = tuple(tensor.cuda() for tensor in digits(TEST))
    plain = Net()
    data = DataLoader(TensorDataset(*digits(TRAIN)), BATCH, shuffle=True, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), lr=RATE), data
    )

    def train() -> None:
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()

    return in_epochs(epochs, train, lambda: accuracy(model, held_out))


def with_lightning(epochs: int) -> Clock:
    """Train with Lightning, bf16, everything that can be switched off switched off."""
    import lightning

    held_out = tuple(tensor.cuda() for tensor in digits(TEST))
    clock: Clock = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

        def on_train_epoch_start(self) -> None:
            self.begun = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            torch.cuda.synchronize()
            trained = time.perf_counter()
            accuracy(self.net, held_out)
            torch.cuda.synchronize()
            clock.append((trained - self.begun, time.perf_counter() - trained))

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=epochs, precision="bf16-mixed", **quiet
    )
    trainer.fit(
        Module(), DataLoader(TensorDataset(*digits(TRAIN)), BATCH, shuffle=True, pin_memory=True)
    )
    return clock


def with_paceline(epochs: int, *words: str) -> Clock:
    """Train the mnist recipe itself, with evaluation, events and console."""
    from paceline.config import config_from_words
    from paceline.recipes import mnist

    os.chdir(tempfile.mkdtemp(prefix="paceline-gpu-"))
    vars(mnist).update(read_digits=lambda _: (digits(TRAIN), digits(TEST)))
    fixed = [
        "device=cuda",
        f"epochs={epochs}",
        f"batch.global_size={BATCH}",
        "batch.lanes=1",
        "data=mnist",
        "checkpoint.every=end",
    ]
    mnist.main(config_from_words(mnist.MnistConfig, [*fixed, "lr.schedule=constant", *words]))
    events = [json.loads(line) for line in Path("runs/mnist/events.jsonl").read_text().splitlines()]
    done = [event for event in events if event["event"] == "EpochDone"]
    ends = [event["time_s"] for event in done]
    trained = [TRAIN / event["samples_per_s"] for event in done]
    whole = [0.0, *(later - earlier for earlier, later in itertools.pairwise(ends))]
    return [
        (train, max(0.0, all_of_it - train))
        for train, all_of_it in zip(trained, whole, strict=True)
    ]


FAST = ("capture=true", "compile=true", "precision=bf16")
CONTENDERS: dict[str, Callable[[int], Clock]] = {
    "hand-captured": captured_by_hand,
    "paceline": lambda epochs: with_paceline(epochs, *FAST),
    "paceline-free": lambda epochs: with_paceline(epochs, *FAST, "exact=false"),
    "hand-eager": by_hand,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}


if __name__ == "__main__":
    found = CONTENDERS[sys.argv[1]](int(sys.argv[2]))[1:]
    print(
        "\n"
        + json.dumps(
            {"training": [pair[0] for pair in found], "all": [sum(pair) for pair in found]}
        )
    )
