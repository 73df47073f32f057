"""Evaluation and prediction inside of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.collate import Collate
from paceline.errors import ConfigError
from paceline.exact.strategy import Strategy
from paceline.train.callbacks import Callbacks
from paceline.train.evaluation.inference import Inference, Pass, Score
from paceline.train.rank_helpers import RankHelpers
from paceline.train.run_loop import RunLoop
from paceline.train.saving.run_state import Registered

_WITH_SEED, _BY_STEP = 1, 2  # keep the random numbers of each apart


class RunEvaluation(RankHelpers):
    """The part of a run that computes without training."""

    config: RunConfig
    _strategy: Strategy
    _parts: Registered
    _loop: RunLoop | None
    _callbacks: Callbacks
    _made: tuple[RunConfig, Inference] | None = None
    _predictions = (-1, 0)
    """The steps that were done at the last prediction without a seed, and how many came at this point."""

    def evaluate(
        self,
        data: Any,
        score: Score,
        *,
        metrics: Mapping[str, Any] | None = None,
        collate: Collate | None = None,
        batches: int = 0,
    ) -> dict[str, float]:
        """Return the mean of every value of `score(batch)` over a dataset. Every rank must call this.

        - `data`: as for `run.steps`, but not a stream; every sample counts once. A dict of datasets is evaluated one by
          one: {"val": a, "test": b} gives val/acc and test/acc.
        - `score`: returns a dict: a value is a tensor with one entry per sample, or (sum, count).
        - `metrics`: torchmetrics objects by name; the value of that name is what their `update` takes:
          {"f1": (preds, target)}.
        - `collate`: as for `run.steps`.
        - `batches`: take only the first batches of each dataset, for a trial that callbacks are not told of; 0: all.

        Models are in eval mode meanwhile; afterwards modes, buffers and random generators are as before. The score draws
        the same random numbers in every call, so that two evaluations differ by the model alone. Inside of the loop the
        means are reported with the step.

        >>> with paceline.Run(config) as run:
        ...     run.evaluate((torch.arange(8.0),), lambda batch: {"mean": batch[0]})
        {'mean': 3.5}
        """
        found: dict[str, float] = {}
        for prefix, dataset in _named_datasets(data).items():
            with self._pass(dataset, collate) as over:
                values = self._inference.evaluate(over, score, metrics or {}, batches)
            found |= {f"{prefix}{name}": value for name, value in values.items()}
        if self._loop is not None:
            self._loop.metrics.update(found)
        if not batches:
            self._callbacks.call("evaluation_end", found)
        return found

    @overload
    def predict(
        self,
        data: Any,
        function: Callable[[Any], Any],
        *,
        collate: Collate | None = None,
        seed: int | None = None,
    ) -> Any: ...

    @overload
    def predict(
        self,
        data: Any,
        function: Callable[[Any], Any],
        *,
        collate: Collate | None = None,
        to: str | Path,
        seed: int | None = None,
    ) -> None: ...

    def predict(
        self,
        data: Any,
        function: Callable[[Any], Any],
        *,
        collate: Collate | None = None,
        to: str | Path = "",
        seed: int | None = None,
    ) -> Tensor | dict[str, Tensor] | None:
        """Return the rows of `function(batch)` for all samples, in dataset order, on the CPU of every rank.

        Every rank must call this.

        - `data`: as for `run.evaluate`.
        - `function`: returns a tensor with one row per sample, or a dict of such tensors.
        - `collate`: as for `run.steps`.
        - `to`: a folder; the rows are written there as shards for `paceline.open_dataset`, and no rank holds them all. A
          list with one vector per sample is then a column of varying length.
        - `seed`: the function draws the same random numbers in every call with this seed. None: other ones in every call,
          keyed by the step and the number of the call in it: the same on any number of ranks and after a resume.

        >>> with paceline.Run(config) as run:
        ...     run.predict((torch.arange(3.0),), lambda batch: 2 * batch[0])
        tensor([0., 2., 4.])
        """
        with self._pass(data, collate) as evaluation:
            over = replace(evaluation, draws=self._draws(seed))
            if not to:
                return self._inference.predict(over, function)
            self._inference.predict_to(_folder(to), over, function)
            return None

    def _draws(self, seed: int | None) -> tuple[int, ...]:
        """Return the key of the random numbers of a prediction. Every rank makes the same calls."""
        if seed is not None:
            return (_WITH_SEED, seed)
        steps = -1 if self._loop is None else self._loop.done
        last, calls = self._predictions
        self._predictions = steps, calls + 1 if steps == last else 1
        return (_BY_STEP, steps, self._predictions[1])

    @property
    def _inference(self) -> Inference:
        """Runs all passes with these settings; run.steps(...) may take a batch size from its data."""
        if self._made is None or self._made[0] is not self.config:
            self._made = self.config, Inference(self.world, self.config, self._strategy)
        return self._made[1]

    @contextlib.contextmanager
    def _pass(self, data: Any, collate: Collate | None) -> Iterator[Pass]:
        """Return a pass over a dataset; its time does not count as training."""
        if self._loop is None:
            yield Pass(self._modules(), data, collate)
            return
        self._loop.settle()
        begun = time.perf_counter()
        trace, after_batch = self._loop.updates.trace, self._loop.observers.evaluating()
        with self._loop.evaluating():
            yield Pass(self._modules(), data, collate, after_batch, trace.batch if trace else None)
        self._loop.leave_out(time.perf_counter() - begun)

    def _modules(self) -> list[nn.Module]:
        tracked = self._parts.tracked.objects.values()
        return [
            *self._parts.models.values(),
            *(item for item in tracked if isinstance(item, nn.Module)),
        ]


def _named_datasets(data: Any) -> dict[str, Any]:
    """Return datasets by the prefix of their metrics.

    >>> _named_datasets([1, 2]), _named_datasets({"val": [1], "test": [2]})
    ({'': [1, 2]}, {'val/': [1], 'test/': [2]})
    """
    if not isinstance(data, Mapping):
        return {"": data}
    if not data or any(isinstance(value, Tensor) for value in data.values()):
        raise ConfigError(
            f"run.evaluate got a dict with {', '.join(map(str, data)) or 'nothing'}; a dict names several datasets",
            fix='pass tensors as a tuple, (inputs, targets), and several datasets as {"val": a, "test": b}',
        )
    return {f"{name}/": value for name, value in data.items()}


def _folder(to: str | Path) -> Path:
    if "://" in str(to):
        raise ConfigError(
            f"run.predict writes to a folder, not to {to}", fix="pass the path of a folder in to="
        )
    return Path(to)
