"""Evaluation and prediction inside of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.collate import Collate
from paceline.train.inference import Inference, Score
from paceline.train.rank_helpers import RankHelpers
from paceline.train.run_loop import RunLoop
from paceline.train.run_state import Registered


class RunEvaluation(RankHelpers):
    """The part of a run that computes without training."""

    config: RunConfig
    _parts: Registered
    _loop: RunLoop | None

    def evaluate(
        self, data: Any, score: Score, *, collate: Collate | None = None
    ) -> dict[str, float]:
        """Return the mean of every value of `score(batch)` over a dataset. Every rank must call this.

        - `data`: as for `run.steps`, but not a stream; every sample counts once.
        - `score`: returns a dict: a value is a tensor with one entry per sample, or (sum, count).
        - `collate`: as for `run.steps`.

        Models are in eval mode meanwhile; afterwards modes, buffers and random generators are as before. Inside of the loop
        the means are reported with the step.

        >>> with paceline.Run(config) as run:
        ...     run.evaluate((torch.arange(8.0),), lambda batch: {"mean": batch[0]})
        {'mean': 3.5}
        """
        found: dict[str, float] = {}
        with self._inference() as (inference, sign):
            found = inference.evaluate(self._modules(), data, score, collate, sign)
        if self._loop is not None:
            self._loop.metrics.update(found)
        return found

    def predict(
        self, data: Any, function: Callable[[Any], Any], *, collate: Collate | None = None
    ) -> Tensor:
        """Return the rows of `function(batch)` for all samples, in dataset order, on the CPU of every rank. Every rank must call this.

        - `data`: as for `run.evaluate`.
        - `function`: returns a tensor with one row per sample.
        - `collate`: as for `run.steps`.

        >>> with paceline.Run(config) as run:
        ...     run.predict((torch.arange(3.0),), lambda batch: 2 * batch[0])
        tensor([0., 2., 4.])
        """
        with self._inference() as (inference, sign):
            return inference.predict(self._modules(), data, function, collate, sign)

    @contextlib.contextmanager
    def _inference(self) -> Iterator[tuple[Inference, Callable[[], None]]]:
        inference = Inference(self.world, self.config)
        if self._loop is None:
            yield inference, lambda: None
            return
        begun = time.perf_counter()
        yield inference, self._loop.observers.evaluating()
        self._loop.leave_out(time.perf_counter() - begun)

    def _modules(self) -> list[nn.Module]:
        tracked = self._parts.tracked.objects.values()
        return [
            *self._parts.models.values(),
            *(item for item in tracked if isinstance(item, nn.Module)),
        ]
