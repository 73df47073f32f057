"""Evaluation and prediction: every sample once, the same result on any number of ranks, and the model as before."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.nest import to_device
from paceline.data.reading.source import as_source
from paceline.errors import ConfigError
from paceline.scale.batch import share
from paceline.train.parallel import shards
from paceline.train.precision import Precision
from paceline.world.collectives import all_gather_rows, all_gather_texts, sum_across
from paceline.world.randomness import mix, seed_everything
from paceline.world.world import World

Score = Callable[[Any], Mapping[str, Any]]
"""score(batch) -> named values: one value per sample, or (sum, count)."""

_KEY = mix(0x6576616C)
"""Keeps the random numbers of evaluations apart from those of steps."""


class Inference:
    """Runs functions over datasets without training."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._config = world, config
        self._precision = Precision(config, world.device, world.size)
        self._size = max(1, config.batch.global_size // config.batch.lanes)

    def evaluate(
        self,
        modules: Sequence[nn.Module],
        data: Any,
        score: Score,
        collate: Callable[[list[Any]], Any] | None = None,
        after_batch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Return the mean of every named value over all samples. Every rank must call this."""
        names: list[str] = []
        rows: list[tuple[int, list[float]]] = []
        total = 0
        with self._undisturbed(modules):
            for number, samples, batch in self._batches(data, collate):
                found = _sums(score(batch), samples)
                if number is None:
                    continue
                names = names or list(found)
                rows.append((number, [value for pair in found.values() for value in pair]))
                after_batch()
            total = self._count
        return _means(self._world, names, rows, total)

    def predict(
        self,
        modules: Sequence[nn.Module],
        data: Any,
        function: Callable[[Any], Any],
        collate: Callable[[list[Any]], Any] | None = None,
        after_batch: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return the outputs of all samples in dataset order, on every rank. Every rank must call this."""
        outputs: list[Tensor] = []
        with self._undisturbed(modules):
            for number, samples, batch in self._batches(data, collate):
                output = function(batch)
                if number is None:
                    continue
                if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != samples:
                    shape = (
                        list(output.shape) if isinstance(output, Tensor) else type(output).__name__
                    )
                    raise ConfigError(
                        f"the function of run.predict returned {shape} for {samples} samples",
                        fix="return a tensor with one row per sample",
                    )
                outputs.append(output.detach())
                after_batch()
        return gather_in_order(self._world, torch.cat(outputs) if outputs else None)

    def _batches(
        self, data: Any, collate: Callable[[list[Any]], Any] | None
    ) -> Iterator[tuple[int | None, int, Any]]:
        """Yield this rank's batches: number, samples, and the batch on the device.

        A batch without a number is run only because other ranks have more, and must gather this rank's shards.
        """
        source = as_source(data, collate)
        samples = len(source)
        self._count = -(-samples // self._size)
        mine: list[int | None] = list(share(self._count, self._world.rank, self._world.size))
        if shards(self._world, self._config):
            most = len(share(self._count, 0, self._world.size))
            mine += [None] * (most - len(mine))
        for number in mine:
            begin = (number or 0) * self._size
            places = numpy.arange(begin, min(begin + self._size, samples))
            batch = to_device(source.gather(places, (self._config.seed, 0)), self._world.device)
            seed_everything(self._config.seed, _KEY, number or 0)
            with self._precision.context():
                yield number, len(places), batch

    @contextlib.contextmanager
    def _undisturbed(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Put modules into eval mode; give each back its mode, its buffers and the state of the generators."""
        every = {module for model in modules for module in model.modules()}
        modes = {module: module.training for module in every}
        buffers = []
        for module in every:
            for key, value in module._buffers.items():  # noqa: SLF001 - its own, not its children's
                if value is not None:
                    buffers.append((module, key, value, value.clone()))
        states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()  # noqa: NPY002
        for model in modules:
            model.eval()
            self._precision.begin(model)
        try:
            with torch.no_grad():
                yield
        finally:
            for model in modules:
                self._precision.finish(model)
            for module, training in modes.items():
                module.training = training
            for module, key, value, before in buffers:
                module._buffers[key] = value  # noqa: SLF001 - the function may have assigned another tensor
                if not torch.equal(value, before):
                    value.copy_(before)
            torch.set_rng_state(states[0])
            numpy.random.set_state(states[1])  # noqa: NPY002
            random.setstate(states[2])


def _sums(found: Mapping[str, Any], samples: int) -> dict[str, tuple[float, float]]:
    """Return (sum, count) of every named value of a batch.

    >>> _sums({"acc": torch.tensor([1.0, 0.0]), "tokens": (7.0, 9)}, samples=2)
    {'acc': (1.0, 2.0), 'tokens': (7.0, 9.0)}
    """
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"the function of run.evaluate returned {type(found).__name__}, not a dict",
            fix='return {"name": one value per sample, or (sum, count)}',
        )
    sums = {}
    for name, value in found.items():
        if isinstance(value, tuple) and len(value) == 2:
            sums[name] = float(value[0]), float(value[1])
        elif isinstance(value, Tensor) and value.shape[:1] == (samples,):
            sums[name] = float(value.double().sum()), float(value.numel())
        else:
            shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(
                f"the value {name!r} of run.evaluate is {shape} for {samples} samples: its mean over the dataset is unknown",
                fix="return one value per sample, or (sum, count)",
            )
    return sums


def _means(
    world: World, names: list[str], rows: list[tuple[int, list[float]]], batches: int
) -> dict[str, float]:
    """Return the means over all batches, added in the order of the batches on every rank."""
    names = next(
        json.loads(text) for text in all_gather_texts(world, json.dumps(names)) if text != "[]"
    )
    table = torch.zeros(batches, 2 * len(names), dtype=torch.float64)
    for number, values in rows:
        table[number] = torch.tensor(values, dtype=torch.float64)
    # Ranks fill different rows of zeros, so this sum has no rounding.
    totals = sum_across(world, table).numpy().sum(axis=0).tolist()
    means = {}
    for position, name in enumerate(names):
        total, count = totals[2 * position : 2 * position + 2]
        means[name] = total / count if count else math.nan
    return means


def gather_in_order(world: World, rows: Tensor | None) -> Tensor:
    """Return the rows of all ranks, those of rank 0 first; a rank may have none. Every rank must call this."""
    own = None if rows is None else [len(rows), str(rows.dtype), list(rows.shape[1:])]
    facts = [json.loads(text) for text in all_gather_texts(world, json.dumps(own))]
    given = [fact for fact in facts if fact is not None]
    if any(fact[1:] != given[0][1:] for fact in given):
        shapes = ", ".join(f"{fact[1]}{fact[2]}" for fact in given)
        raise ConfigError(
            f"the rows of the ranks have different types or shapes: {shapes}",
            fix="pad the outputs to one shape",
        )
    _, dtype, shape = given[0]
    counts = [fact[0] if fact else 0 for fact in facts]
    like = torch.zeros(max(counts), *shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    if rows is not None:
        like[: len(rows)] = rows.cpu()
    gathered = all_gather_rows(world, like.flatten().view(torch.uint8))
    parts = []
    for part, count in zip(gathered, counts, strict=True):
        parts.append(part.view(like.dtype).view(like.shape)[:count])
    return torch.cat(parts)
