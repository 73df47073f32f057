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

        A value is a tensor with one entry per sample, or (sum, count). Models are in eval mode meanwhile; afterwards
        modes, buffers and random generators are as before.
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
        """Return the rows of `function(batch)` for all samples, in dataset order. Every rank must call this."""
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
