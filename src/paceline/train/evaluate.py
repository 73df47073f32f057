"""Evaluate the model on every sample exactly once, shared out over all ranks."""

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
"""metric(outputs, target) -> the sum over these samples; runs report the mean over all samples."""


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the number of outputs whose largest value is at the target class: a metric for `Trainer`.

    - `outputs`: one row of scores per sample, with one score per class.
    - `target`: the right class of each sample.

    >>> int(accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])))
    1
    """
    return (outputs.argmax(dim=-1) == target).sum()


def check_evaluation(config: RunConfig, *, given: bool) -> None:
    """Refuse evaluate_steps for a training without evaluation data."""
    if config.evaluate_steps and not given:
        raise ConfigError(
            f"evaluate_steps={config.evaluate_steps}, but this training has no evaluation dataset",
            fix="set evaluate_steps=0, or pass a dataset to the Trainer: evaluation=(inputs, targets)",
        )


class Evaluation:
    """A held-out dataset in batches that do not depend on the number of ranks."""

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
        stored = self._transform.source if self._transform else source
        self._source = cache_on_gpu(stored, world.device, config.read.resident_gb)
        self._precision = Precision(config, world.device, world.size)
        self._gathers_weights = shards(world, config)
        self._loss, self._metrics = loss, metrics
        self._world, self._key = world, (config.seed, 0)
        size = max(1, config.batch.global_size // config.batch.lanes)
        self._batches = []
        for start in range(0, len(self._source), size):
            self._batches.append(range(start, min(start + size, len(self._source))))

    def run(
        self, model: nn.Module, after_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return the means of the loss and of every metric. Every rank must call this."""
        module = inner(model)
        shape = len(self._batches), 2 + len(self._metrics)
        sums = torch.zeros(shape, dtype=torch.float64, device=self._world.device)
        training = module.training
        module.eval()
        self._precision.begin(module)
        with torch.no_grad():
            for number in self._my_batches():
                sums[number] = self._sums_of(module, self._batches[number])
                after_batch()
            for _ in range(self._idle_batches()):
                self._sums_of(module, self._batches[0])
                after_batch()
        self._precision.finish(module)
        module.train(training)
        # Ranks fill different rows of zeros, so this sum has no rounding; every rank then adds the same rows.
        totals = sum_across(self._world, sums).cpu().numpy().sum(axis=0)
        means = {"eval_loss": float(totals[0] / totals[1])}
        for name, total in zip(self._metrics, totals[2:], strict=True):
            means[name] = float(total / len(self._source))
        return means

    def _my_batches(self) -> range:
        return share(len(self._batches), self._world.rank, self._world.size)

    def _idle_batches(self) -> int:
        """Return how many batches to run only because other ranks have more, and must gather this rank's shards."""
        most = len(share(len(self._batches), 0, self._world.size))
        return most - len(self._my_batches()) if self._gathers_weights else 0

    def _sums_of(self, module: nn.Module, samples: range) -> Tensor:
        """Return loss, count and metrics of a batch, on the device: the host does not wait for them."""
        *inputs, target = self._read(numpy.arange(samples.start, samples.stop))
        with self._precision.context():
            outputs = module(*inputs)
            result = self._loss(outputs, target)
        if isinstance(result, tuple):
            loss, count = result
        else:
            loss, count = result * len(samples), len(samples)
        sums = [loss, count, *(metric(outputs, target) for metric in self._metrics.values())]
        return torch.stack([_on(loss.device, value) for value in sums])

    def _read(self, samples: Places) -> Batch:
        """Return samples on the device, transformed there."""
        device, stored = self._world.device, self._source.gather(samples, self._key)
        batch = tuple(tensor.to(device) for tensor in stored)
        if self._transform is None:
            return batch
        return self._transform.apply(batch, samples, self._key)


def _on(device: torch.device, value: Tensor | float) -> Tensor:
    """Return a number as a float64 tensor on the device, without making the host wait."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
