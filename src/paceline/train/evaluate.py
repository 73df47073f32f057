"""How good the model is, on every sample exactly once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.order import Places
from paceline.data.reading.resident import cache_on_gpu
from paceline.data.reading.source import Batch, as_source
from paceline.data.reading.transform import Transformed
from paceline.errors import ConfigError
from paceline.scale.batch import share
from paceline.train.optimizer_step import LossFunction
from paceline.train.parallel import inner, shards
from paceline.train.precision import Precision
from paceline.world.collectives import sum_across
from paceline.world.world import World

Metric = Callable[[Tensor, Tensor], Tensor | float]
"""metric(outputs, target) -> the sum over these samples; the mean over all samples is reported."""


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Return how many outputs have their largest value at the target's class.

    >>> int(accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])))
    1
    """
    return (outputs.argmax(dim=-1) == target).sum()


def check_evaluation(config: RunConfig, *, given: bool) -> None:
    """Refuse to evaluate between steps where there is nothing to evaluate on."""
    if config.evaluate_steps and not given:
        raise ConfigError(
            f"evaluate_steps={config.evaluate_steps}, but this training has no evaluation set",
            fix="set evaluate_steps=0, or give the Trainer one: evaluation=(inputs, targets)",
        )


class Evaluation:
    """A held-out set, cut into pieces that do not depend on the world, shared out over the ranks."""

    def __init__(
        self,
        data: Any,
        loss: LossFunction,
        metrics: Mapping[str, Metric],
        config: RunConfig,
        world: World,
    ) -> None:
        source = as_source(data)
        self._transform = source if isinstance(source, Transformed) else None
        self._source = cache_on_gpu(
            self._transform.source if self._transform else source,
            world.device,
            config.read.resident_gb,
        )
        self._precision = Precision(config, world.device, world.size)
        self._together = shards(world, config)
        self._loss, self._metrics = loss, metrics
        self._world, self._key = world, (config.seed, 0)
        size = max(1, config.batch.global_size // config.batch.lanes)
        self._pieces = [
            range(start, min(start + size, len(self._source)))
            for start in range(0, len(self._source), size)
        ]

    def run(self, model: nn.Module, sign: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Return the means of the loss and of every metric. Every rank must call this; `sign` is called piece by piece."""
        module = inner(model)
        sums = torch.zeros(
            len(self._pieces),
            2 + len(self._metrics),
            dtype=torch.float64,
            device=self._world.device,
        )
        training = module.training
        module.eval()
        self._precision.begin(module)
        with torch.no_grad():
            for number in self._mine():
                sums[number] = self._sums_of(module, self._pieces[number])
                sign()
            for _ in range(self._idle()):
                self._sums_of(module, self._pieces[0])
                sign()
        self._precision.finish(module)
        module.train(training)
        # Ranks fill different rows of zeros, so this sum has no rounding; the one over the rows is the same everywhere.
        totals = sum_across(self._world, sums).cpu().numpy().sum(axis=0)
        names = {"eval_loss": totals[0] / totals[1]}
        return {name: float(value) for name, value in (names | self._means(totals)).items()}

    def _mine(self) -> range:
        return share(len(self._pieces), self._world.rank, self._world.size)

    def _idle(self) -> int:
        """Return how many pieces to run once more, for the sake of ranks that have more: they need slices of the weights."""
        most = len(share(len(self._pieces), 0, self._world.size))
        return most - len(self._mine()) if self._together else 0

    def _means(self, totals: numpy.typing.NDArray[numpy.float64]) -> dict[str, float]:
        return {
            name: totals[2 + number] / len(self._source)
            for number, name in enumerate(self._metrics)
        }

    def _sums_of(self, module: nn.Module, piece: range) -> Tensor:
        """Return the sums over a piece, on the device: nobody waits for them."""
        *inputs, target = self._batch(numpy.arange(piece.start, piece.stop))
        with self._precision.context():
            outputs = module(*inputs)
            found = self._loss(outputs, target)
        loss, count = found if isinstance(found, tuple) else (found * len(piece), len(piece))
        sums = [loss, count, *(metric(outputs, target) for metric in self._metrics.values())]
        return torch.stack([_on(loss.device, value) for value in sums])

    def _batch(self, samples: Places) -> Batch:
        """Return some samples on the device, transformed there."""
        batch = tuple(
            tensor.to(self._world.device) for tensor in self._source.gather(samples, self._key)
        )
        return (
            batch if self._transform is None else self._transform.apply(batch, samples, self._key)
        )


def _on(device: torch.device, value: Tensor | float) -> Tensor:
    """Return a number on the device; a number of the host by a kernel, for which nobody waits."""
    return (
        value.to(device, torch.float64)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)
    )
