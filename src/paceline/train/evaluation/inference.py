"""Evaluation and prediction: every sample once, the same result on any number of ranks, and the model as before."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.collate import Collate
from paceline.errors import ConfigError
from paceline.exact.precision import Precision
from paceline.exact.strategy import Strategy
from paceline.scale.batch import LaneChoice, share
from paceline.train.evaluation.captured_scores import CapturedScores
from paceline.train.evaluation.evaluation_source import EvaluationSource, EvaluationSources
from paceline.train.evaluation.metric_objects import MetricObjects
from paceline.train.evaluation.prediction import OUTPUT, Columns, PredictionShards, columns_from
from paceline.train.evaluation.score_sums import ScoreSums, check_mapping
from paceline.train.evaluation.undisturbed import WholeWeights, undisturbed
from paceline.world.collectives import all_gather_rows, all_gather_texts
from paceline.world.randomness import mix, seed_everything
from paceline.world.world import World

Score = Callable[[Any], Mapping[str, Any]]
"""score(batch) -> named values: one value per sample, (sum, count), or the arguments of a metric object."""

_KEY = mix(0x6576616C)
"""Keeps the random numbers of evaluations apart from those of steps."""


class NumberedBatch(NamedTuple):
    """A batch of an evaluation."""

    number: int | None
    """None: run only because other ranks have more batches, and must gather this rank's shards."""
    samples: int
    values: Any


@dataclass(frozen=True)
class Pass:
    """One pass over a dataset."""

    modules: Sequence[nn.Module]
    data: Any
    collate: Collate | None = None
    after_batch: Callable[[], None] = lambda: None
    note: Callable[[int, Tensor], None] | None = None
    """Is called with the number of a batch and the sums of its metrics."""
    draws: tuple[int, ...] = ()
    """Keeps the random numbers of this pass apart from those of others; empty: those of every evaluation."""


class Inference:
    """Runs functions over datasets without training. A run has one, which keeps the datasets open."""

    def __init__(
        self,
        world: World,
        config: RunConfig,
        strategy: Strategy,
        choice: LaneChoice | None = None,
    ) -> None:
        self._world, self._config = world, config
        self._precision = Precision(config, world.device, gathers_bf16=strategy.gathers_bf16)
        self._sources = EvaluationSources(world, config)
        self._weights = WholeWeights(world, strategy)
        self._size = max(1, config.batch.global_size // config.batch.lanes)
        self._begin_batch: Callable[[], None] = lambda: None
        self._choose = share if choice is None else choice.choose
        self._scores = None
        if strategy.captures and not strategy.shards:
            self._scores = CapturedScores(world.device)

    def evaluate(
        self, over: Pass, score: Score, metrics: Mapping[str, Any], batches: int = 0
    ) -> dict[str, float]:
        """Return the mean of every named value and the result of every metric object. Every rank must call this.

        `batches` limits the pass to the first batches; 0: all.
        """
        source = self._sources.of(over.data, over.collate, "run.evaluate")
        count = self._count(source)
        count = min(count, batches) if batches else count
        sums, objects = ScoreSums(self._world), MetricObjects(metrics, self._world)
        mine = self._choose(count, self._world.rank, self._world.size)
        most = len(share(count, 0, self._world.size))
        scores = self._scores if not metrics else None
        with self._running(over.modules) as is_free:
            if scores is not None:
                scores.begin(score, over.modules)
            for batch in self._batches(source, mine, 0 if is_free else most):
                row = self._row(batch, score, sums, objects, scores)
                if batch.number is not None:
                    sums.put(batch.number, row)
                    if over.note is not None and row is not None:
                        over.note(batch.number, row)
                    over.after_batch()
            seed_everything(self._config.seed, _KEY, -1)
            results = objects.compute()
        return sums.means(count) | results

    def _row(
        self,
        batch: NumberedBatch,
        score: Score,
        sums: ScoreSums,
        objects: MetricObjects,
        scores: CapturedScores | None,
    ) -> Tensor | None:
        """Return the sums and counts of a batch, replayed if that was captured."""
        seed = mix(*self._seeds(batch))
        if scores is not None and (row := scores.replay(batch.values, seed)) is not None:
            sums.names = scores.names
            return row
        self._begin_batch()
        seed_everything(*self._seeds(batch))

        def to_row(values: Any) -> Tensor | None:
            with self._precision.context():
                found = check_mapping(score(values))
                if batch.number is None:
                    return None
                return sums.row(f"batch {batch.number}", objects.take(found), batch.samples)

        row = to_row(batch.values)
        if scores is not None:
            scores.names = sums.names
            scores.learn(to_row, batch.values, seed, row)
        return row

    def _seeds(self, batch: NumberedBatch, draws: tuple[int, ...] = ()) -> tuple[int, ...]:
        return self._config.seed, _KEY, batch.number or 0, *draws

    def _call(
        self, function: Callable[[Any], Any], batch: NumberedBatch, draws: tuple[int, ...]
    ) -> Any:
        """Return what a function returns for a batch, whatever batches came before it."""
        self._begin_batch()
        seed_everything(*self._seeds(batch, draws))
        with self._precision.context():
            return function(batch.values)

    def predict(self, over: Pass, function: Callable[[Any], Any]) -> Tensor | dict[str, Tensor]:
        """Return the outputs of all samples in dataset order, on every rank. Every rank must call this."""
        source = self._sources.of(over.data, over.collate, "run.predict")
        count = self._count(source)
        mine = share(count, self._world.rank, self._world.size)
        most = len(share(count, 0, self._world.size))
        outputs: list[Any] = []
        with self._running(over.modules) as is_free:
            for batch in self._batches(source, mine, 0 if is_free else most):
                output = columns_from(self._call(function, batch, over.draws), batch.samples)
                if batch.number is not None:
                    outputs.append(output)
                    over.after_batch()
        return _gather_columns(self._world, outputs)

    def predict_to(self, folder: Path, over: Pass, function: Callable[[Any], Any]) -> None:
        """Write the outputs of all samples in dataset order as shards. Every rank must call this."""
        source = self._sources.of(over.data, over.collate, "run.predict")
        shards = PredictionShards(folder, self._world, len(source), self._size, self._config)
        with self._running(over.modules) as is_free, shards.writing():
            for batch in self._batches(
                source, shards.batches, 0 if is_free else shards.most_batches
            ):
                output = columns_from(self._call(function, batch, over.draws), batch.samples)
                if batch.number is not None:
                    shards.add(batch.number, output)
                    over.after_batch()

    @contextlib.contextmanager
    def _running(self, modules: Sequence[nn.Module]) -> Iterator[bool]:
        """Run without training; yield whether forward is free of collectives."""
        fast = self._config.parallel != "fsdp"
        with (
            self._weights.gathered(modules) as is_free,
            undisturbed(modules, self._precision, fast_attention=fast) as self._begin_batch,
        ):
            yield is_free

    def _count(self, source: EvaluationSource) -> int:
        return -(-len(source) // self._size)

    def _batches(
        self, source: EvaluationSource, numbers: Sequence[int], at_least: int
    ) -> Iterator[NumberedBatch]:
        """Yield these batches on the device, and idle ones until there are `at_least` so many."""
        idle = [None] * (at_least - len(numbers))
        for number in [*numbers, *idle]:
            begin = (number or 0) * self._size
            end = min(begin + self._size, len(source))
            yield NumberedBatch(number, end - begin, source.read(begin, end))


def _gather_columns(world: World, outputs: list[Columns]) -> Tensor | dict[str, Tensor]:
    """Return the outputs of all ranks: one tensor, or one per name."""
    own = list(outputs[0]) if outputs else None
    every = [json.loads(text) for text in all_gather_texts(world, json.dumps(own))]
    names: list[str] = next((each for each in every if each is not None), [])
    found = {}
    for name in names:
        rows = [output[name] for output in outputs if isinstance(output[name], Tensor)]
        if len(rows) < len(outputs):
            raise ConfigError(
                f"the function of run.predict returned rows of different lengths in {name!r}",
                fix='pad them to one shape, or write them to files: run.predict(..., to="folder")',
            )
        found[name] = gather_in_order(world, torch.cat(rows) if rows else None)
    return found[OUTPUT] if list(found) == [OUTPUT] else found


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
