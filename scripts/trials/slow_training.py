"""A small training that is slow on purpose: on one rank, in one phase, in every step or in one.

`paceline run -n 2 scripts/trials/slow_training.py slow.phase=data slow.rank=1 slow.seconds=0.02`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline
from paceline.config import BatchConfig, CheckpointConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.exact.buckets import Bucket, BucketedSum

SAMPLES, WIDTH = 2048, 64


@dataclass(frozen=True)
class SlowConfig:
    """What is slow."""

    phase: str = ""
    """data, forward, backward, optimizer, gc, compute or communication; empty: nothing. compute is slow by computing, the others by sleeping."""
    rank: int = 0
    """The rank; -1: all."""
    seconds: float = 0.02
    """How long, each time."""
    step: int = 0
    """Only in this step; 0: in every one."""


@dataclass(frozen=True)
class TrainingConfig(RunConfig):
    """A training of some steps."""

    name: str = "slow"
    steps: int = 60
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_size=32, lanes=6))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every="end"))
    slow: SlowConfig = field(default_factory=SlowConfig)
    width: int = WIDTH
    """Numbers in a layer: a wide one has many bytes to send."""


class Delay:
    """Sleeps or computes where it is asked to."""

    def __init__(self, config: SlowConfig, rank: int) -> None:
        self._config, self._mine = config, config.rank in {rank, -1}
        self.step = 0

    def here(self, phase: str) -> None:
        """Be slow, if this is the place."""
        if self._mine and phase == self._config.phase and self._config.step in {0, self.step}:
            {"gc": _slow_collection, "compute": _compute}.get(phase, time.sleep)(
                self._config.seconds
            )

    def steps(self, steps: Iterable[Any]) -> Iterator[Any]:
        """Pass on steps, as slow data would."""
        for step in steps:
            self.step = step.plan.index + 1
            self.here("data")
            yield step


class _Garbage:
    """A cycle that takes its time to go."""

    def __init__(self, seconds: float) -> None:
        self._me, self._seconds = self, seconds

    def __del__(self) -> None:
        time.sleep(self._seconds)


def _slow_collection(seconds: float) -> None:
    _Garbage(seconds)
    gc.collect(0)


def _compute(seconds: float) -> None:
    one, end = torch.rand(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < end:
        one @ one


class SlowModel(nn.Module):
    """Two layers that may be slow in forward and backward."""

    def __init__(self, width: int, delay: Delay) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, 1))
        self._delay = delay

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layers say."""
        for phase in ("forward", "gc", "compute"):
            self._delay.here(phase)
        found: Tensor = self.layers(inputs)
        if found.requires_grad:
            found.register_hook(lambda _: self._delay.here("backward"))  # type: ignore[no-untyped-call]
        return found


def slow_link(delay: Delay) -> None:
    """Let every bucket of gradients take longer to be sent, as on a slow link."""
    send = BucketedSum._send  # noqa: SLF001

    def send_slowly(gradient_sum: BucketedSum, bucket: Bucket) -> None:
        delay.here("communication")
        send(gradient_sum, bucket)

    BucketedSum._send = send_slowly  # type: ignore[method-assign] # noqa: SLF001


def slow_data(delay: Delay) -> None:
    """Let every step take longer to be read."""
    read = Batches.steps
    Batches.steps = lambda batches, start=0: delay.steps(read(batches, start))  # type: ignore[method-assign,assignment,return-value]


def main(config: TrainingConfig) -> None:
    """Train."""
    with paceline.Run(config) as run:
        delay = Delay(config.slow, run.world.rank)
        slow_link(delay)
        slow_data(delay)
        model = run.model(SlowModel(config.width, delay))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        optimizer.register_step_pre_hook(lambda *_: delay.here("optimizer"))
        data = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1)
        paceline.Trainer(run, model, optimizer, data, mse_loss).fit()


if __name__ == "__main__":
    main(paceline.config_from_argv(TrainingConfig))
