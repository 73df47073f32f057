"""The short way for supervised training: a loop over `Run`, for everyone to copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.reading.collate import Collate
from paceline.train.run import Run

Criterion = Callable[..., Any]
"""criterion(outputs, target) -> the mean over the samples; or (sum, count), for tokens of ragged lengths."""

Metric = Callable[[Tensor, Tensor], Tensor]
"""metric(outputs, target) -> one value per sample."""


class Trainer:
    """Trains a model on batches of (inputs, target), and evaluates it after every epoch."""

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
        """`model` and `optimizer` are those that `run.model` and `run.optimizer` returned."""
        self.run, self.model, self.optimizer, self.data = run, model, optimizer, data
        self.loss: Criterion = torch.compile(loss, dynamic=False) if run.config.compile else loss
        self.evaluation, self.metrics = evaluation, metrics or {}
        self.collate, self.flops_per_sample = collate, flops_per_sample

    def fit(self) -> None:
        """Train until all steps are done, from the newest checkpoint on."""
        steps = self.run.steps(
            self.data, collate=self.collate, flops_per_sample=self.flops_per_sample
        )
        for step in steps:
            self.run.update(self.optimizer, self.batch_loss, step)
            if self.evaluation is not None and step.evaluates:
                self.run.evaluate(self.evaluation, self.batch_scores, collate=self.collate)

    def batch_loss(self, batch: Any) -> Any:
        """Return the loss of one batch."""
        *inputs, target = batch
        return self.loss(self.model(*inputs), target)

    def batch_scores(self, batch: Any) -> dict[str, Any]:
        """Return the loss and the metrics of one batch of the evaluation dataset."""
        *inputs, target = batch
        outputs = self.model(*inputs)
        loss = self.loss(outputs, target)
        scores = {
            "eval_loss": loss if isinstance(loss, tuple) else (loss * len(target), len(target))
        }
        return scores | {name: metric(outputs, target) for name, metric in self.metrics.items()}


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Return for each sample whether the largest output is at the target class.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    return (outputs.argmax(dim=-1) == target).float()
