"""A small training that goes wrong as it is told: FAULT, on rank FAULT_RANK, at step FAULT_STEP. Used by faults.py.

Where FAULT_AFTER names a file or folder, the fault waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, get_worker_info

import paceline
from paceline.data.reading.batches import Batches
from paceline.world.collectives import wire_for

FAULT, STEP = os.environ.get("FAULT", ""), int(os.environ.get("FAULT_STEP", "20"))
SIZE = int(os.environ.get("FAULT_SIZE", "5"))
AFTER = Path(os.environ.get("FAULT_AFTER", "/"))
MARK = Path(os.environ.get("FAULT_MARK", "fault-begun"))


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are made one by one; a dead loader makes no more."""

    def __init__(self, *, dies: bool) -> None:
        self._dies, self._made = dies, 0

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        self._made += 1
        if self._dies and self._made > 8 * STEP and get_worker_info() is not None:
            MARK.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        sample = torch.arange(4.0) + place / 2048
        return sample, sample.sum(0, keepdim=True)


def spin() -> None:
    """Stay in a loop for ever."""
    while True:
        sum(range(1000))


def fail() -> None:
    """Raise what a bad sample raises."""
    raise ValueError("a bad sample")


def stop() -> None:
    """Be stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    """Take memory until there is none."""
    taken = []
    while True:
        taken.append(torch.ones(1 << 24))


def reduce_once(size: int = 3) -> None:
    """Enter a collective that the training does not know of."""
    torch.distributed.all_reduce(torch.ones(size, device=wire_for(torch.device("cpu"))))


def stick() -> None:
    """Keep the GPU busy for minutes."""
    torch.cuda._sleep(1 << 38)  # noqa: SLF001 - some minutes, in cycles


def slow_disk() -> None:
    """Let no file of a checkpoint reach the disk from now on."""
    real = os.fsync

    def fsync(file: int) -> None:
        if threading.current_thread().name == "paceline-save":
            time.sleep(3600)
        real(file)

    os.fsync = fsync


ACTS: dict[str, Callable[[], None]] = {
    "loop": spin, "raise": fail, "stop": stop, "kill": die, "memory": fill, "collective": reduce_once, "disk": slow_disk,
    "first-shape": lambda: reduce_once(SIZE), "barrier": torch.distributed.barrier, "kernel": stick,
}  # fmt: skip


class Faulty:
    """Does what FAULT says, once, when its step has come."""

    def __init__(self, *, mine: bool) -> None:
        self._mine, self._due = mine, False

    def steps(
        self, batches: Batches, read: Callable[[int], Iterator[Any]], first: int
    ) -> Iterator[Any]:
        """Pass on steps; one more at the end, where that is the fault."""
        step = None
        if FAULT == "batch" and self._mine:
            batches.total_steps += 1  # otherwise the run would not ask for it
        for step in read(first):
            self._due = step.plan.index == STEP
            if FAULT == "shape":
                self._sum_a_figure()
            yield step
        if FAULT == "batch" and self._mine and step is not None:
            MARK.touch()
            yield step

    def _sum_a_figure(self) -> None:
        """Add up a figure of its own, as every step of this training does; once it is of another size."""
        if self._due and self._mine:
            MARK.touch()
        reduce_once(SIZE if self._due and self._mine else 3)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss, or do what is wrong."""
        time.sleep(0.01)
        if self._due:
            self._due = False
            self._act()
        return mse_loss(outputs, target)

    def _act(self) -> None:
        if self._mine and FAULT in ACTS:
            while not AFTER.exists():
                time.sleep(0.01)
            MARK.touch()
            ACTS[FAULT]()
        elif FAULT == "first-shape":
            reduce_once()


def faulty_data(faulty: Faulty) -> None:
    """Let the steps of the training pass through the fault."""
    read = Batches.steps
    Batches.steps = lambda batches, start=0: faulty.steps(batches, partial(read, batches), start)  # type: ignore[method-assign,assignment,return-value]


def main(config: paceline.RunConfig) -> None:
    """Train, and go wrong."""
    with paceline.Run(config) as run:
        mine = run.world.rank == int(os.environ.get("FAULT_RANK", "0"))
        faulty = Faulty(mine=mine)
        faulty_data(faulty)
        net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        train = Lines(dies=mine and FAULT == "loader")
        held_out = [Lines(dies=False)[place] for place in range(256)]
        evaluation = torch.utils.data.TensorDataset(
            *(torch.stack(column) for column in zip(*held_out, strict=True))
        )
        paceline.Trainer(run, model, optimizer, train, faulty.loss, evaluation=evaluation).fit()


if __name__ == "__main__":
    main(paceline.config_from_argv())
