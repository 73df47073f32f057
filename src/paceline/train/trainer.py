"""The short way for supervised training: a loop over `Run`, for everyone to copy, and a metric for classifiers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.reading.collate import Collate
from paceline.train.run import Run

Criterion = Callable[..., Any]  # criterion(outputs, target) -> mean, or (sum, count)
Metric = Callable[[Tensor, Tensor], Any]  # metric(outputs, target) -> values, or (sum, count)


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Return for each sample whether the largest output is at the target class: 1 or 0.

    - `outputs`: one row of scores per sample.
    - `target`: the number of the right class of each sample.

    >>> paceline.accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    return (outputs.argmax(dim=-1) == target).float()


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Run without torch.compile: compiling for a single batch would delay the first step."""
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


class Trainer:
    """Trains a model on batches of (inputs, target), and evaluates it after every epoch.

    - `run`: the run that it is part of.
    - `model`: as `run.model` returned it.
    - `optimizer`: as `run.optimizer` returned it.
    - `data`: the training dataset, as for `run.steps`.
    - `loss`: `loss(outputs, target)` returns the mean over the samples; or (sum, count), for tokens of ragged lengths.
    - `evaluation`: the dataset to evaluate after every epoch, and every `evaluate_steps` steps.
    - `metrics`: functions by name; `metric(outputs, target)` returns one value per sample, or (sum, count).
    - `collate`: as for `run.steps`.
    - `flops_per_sample`: as for `run.steps`.

    >>> data = torch.randn(512, 4), torch.randn(512, 1)
    >>> with paceline.Run(config) as run:
    ...     model = run.model(torch.nn.Linear(4, 1))
    ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ...     paceline.Trainer(run, model, optimizer, data, torch.nn.functional.mse_loss).fit()
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        loss: Criterion,
        *,
        evaluation: Any = None,
        metrics: Mapping[str, Metric] | None = None,
        collate: Collate | None = None,
        flops_per_sample: float = 0.0,
    ) -> None:
        self.run, self.model, self.optimizer, self.data = run, model, optimizer, data
        self.loss: Criterion = torch.compile(loss, dynamic=False) if run.config.compile else loss
        self.evaluation, self.metrics = evaluation, metrics or {}
        self.collate, self.flops = collate, flops_per_sample

    def fit(self) -> None:
        """Train until all steps are done, from the newest checkpoint on."""
        if self.evaluation is not None:  # a metric that fails must fail now, not after an epoch
            with _uncompiled() if self.run.config.compile else contextlib.nullcontext():
                self.evaluate(batches=1)
        for step in self.run.steps(self.data, collate=self.collate, flops_per_sample=self.flops):
            self.run.update(self.optimizer, self.batch_loss, step)
            if self.evaluation is not None and step.evaluates:
                self.evaluate()

    def evaluate(self, batches: int = 0) -> dict[str, float]:
        """Return loss and metrics over the evaluation dataset, or over its first batches."""
        data, collate = self.evaluation, self.collate
        return self.run.evaluate(data, self.batch_scores, collate=collate, batches=batches)

    def batch_loss(self, batch: Any) -> Any:
        """Return the loss of one batch."""
        *inputs, target = batch
        return self.loss(self.model(*inputs), target)

    def batch_scores(self, batch: Any) -> dict[str, Any]:
        """Return the loss and the metrics of one batch of the evaluation dataset."""
        *inputs, target = batch
        count, loss = len(target), self.loss(outputs := self.model(*inputs), target)
        scores = {"eval_loss": loss if isinstance(loss, tuple) else (loss * count, count)}
        return scores | {name: metric(outputs, target) for name, metric in self.metrics.items()}
