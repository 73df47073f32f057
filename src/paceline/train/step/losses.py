"""The losses of an update: of each lane, or one over the outputs of the whole batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline import terminal
from paceline.data.reading.batches import Lane, RankBatch
from paceline.errors import ConfigError, TrainingError
from paceline.scale.batch import share, split_evenly
from paceline.train.gradients.protocol import GradientSum
from paceline.train.model.precision import Precision
from paceline.train.model.sharded_tensor import local_part
from paceline.train.step.lane_loss import (
    LaneLoss,
    LossFunction,
    MeanComparison,
    compares_samples,
    is_sum_over_samples,
    lane_loss,
    not_finite,
    refuse_no_count,
)
from paceline.train.step.moving_buffers import MovingBuffers
from paceline.world.collectives import all_gather_rows
from paceline.world.randomness import seed_everything
from paceline.world.world import World


class LaneSeeds(NamedTuple):
    """Seeds of all generators, for each lane of an update."""

    seed: int
    number: int
    """The number of the update in its step: each draws other random numbers."""

    def of(self, step: int, lane: int) -> tuple[int, ...]:
        """Return the numbers that make the seed of a lane."""
        return (self.seed, step, lane, self.number) if self.number else (self.seed, step, lane)


class Trained(Protocol):
    """What an update trains."""

    parameters: list[nn.Parameter]
    precision: Precision
    sum: GradientSum
    looks_at_loss: bool
    """Whether no loss was looked at yet."""
    means: MeanComparison

    def gradient_of(self, output: Tensor, weight: float) -> Tensor:
        """Return the gradient with which the backward of a lane of this weight starts."""


class LaneWork(ABC):
    """Forward of each lane of an update, and the gradient with which its backward starts."""

    names: tuple[str, ...] = ("loss",)
    sums: Sequence[float] = (0.0,)
    counts: Sequence[float] = (0.0,)

    def __init__(
        self,
        world: World,
        updates: Trained,
        function: LossFunction,
        step: RankBatch,
        seeds: LaneSeeds,
    ) -> None:
        self._world, self._updates, self._function = world, updates, function
        self._step, self._seeds = step, seeds

    @abstractmethod
    def forward(self, lane: Lane) -> tuple[Tensor, Tensor]:
        """Run a lane; return its output and the gradient of the output."""

    def run_idle(self, lane: Lane) -> None:
        """Run a lane whose gradient is not used: ranks with one lane more must gather this rank's shards."""
        output, gradient = self.forward(lane)
        torch.autograd.backward(output, torch.zeros_like(gradient))
        self._updates.sum.after_lane()

    @abstractmethod
    def complete(self, count: float) -> None:
        """Finish the gradients, given the count of all lanes."""

    def _call(self, lane: Lane) -> Any:
        seed_everything(*self._seeds.of(self._step.plan.index, lane.number))
        with self._updates.precision.context():
            return self._function(lane.batch)

    def _not_finite(self, value: float, where: str) -> TrainingError:
        return not_finite(value, self._step.plan.index, f"{where} (rank {self._world.rank})")


class LaneLosses(LaneWork):
    """A loss of each lane."""

    _by_count = False
    _seen_names: tuple[str, ...] | None = None

    def forward(self, lane: Lane) -> tuple[Tensor, Tensor]:
        """Run a lane; its gradient starts with its weight in the mean over the samples of the step."""
        found = lane_loss(self._call(lane), lane.samples)
        if not math.isfinite(found.value):
            raise self._not_finite(found.value, f"lane {lane.number}")
        if found.names != self._seen_names:
            self._take_names(found.names, lane)
        if self._updates.looks_at_loss:
            self._updates.looks_at_loss = False
            self._mention_likely_mistakes(found, lane)
        if not self._updates.means.is_over and self._world.is_main:
            self._mention_means(found, lane)
        self._by_count = found.by_count
        if lane.samples:
            self.sums, self.counts = found.sums, found.counts
        else:
            self.sums = self.counts = (0.0,) * len(found.names)
        by_samples = lane.samples / self._step.plan.samples
        weight = float(lane.samples > 0) if found.by_count else by_samples
        return found.output, self._updates.gradient_of(found.output, weight)

    def _mention_likely_mistakes(self, found: LaneLoss, lane: Lane) -> None:
        """Say once that a loss of a lane is not what the loss of the batch would be; with one lane they are the same."""
        lanes = round(self._step.plan.samples / lane.samples) if lane.samples else 1
        if lanes == 1 or not self._world.is_main:
            return
        if compares_samples(found.output, lane.samples):
            terminal.error(
                f"warning: the loss seems to compare the samples of a batch with each other, and is computed per lane: each sample is "
                f"compared with those of its lane of {lane.samples}, not with the {self._step.plan.samples} of the batch\n"
                "  fix: return the rows from the function and pass the loss as run.update(optimizer, rows, step, over_batch=loss), "
                "or set batch.lanes=1 to train on one rank"
            )
        if found.by_count:
            return
        if is_sum_over_samples(found.output, lane.samples):
            terminal.error(
                f'warning: the loss seems to be a sum over samples (reduction="sum"), and a tensor is taken for the mean of its lane: '
                f"with {lanes} lanes the gradient is 1/{lanes} of that of the sum over the batch\n"
                "  fix: return (loss, samples) for the mean over samples, or multiply the loss by config.batch.lanes for the sum"
            )

    def _mention_means(self, found: LaneLoss, lane: Lane) -> None:
        """Say once that the loss is no mean over samples: a lane with few tokens counts as much as one with many."""
        plan = self._step.plan
        if found.by_count or lane.samples in {0, plan.samples}:
            return
        update = plan.index, self._seeds.number
        means = self._updates.means
        if how := means.add(found.output, lane.number, lane.samples, update, len(self._step.lanes)):
            terminal.error(
                f"warning: the loss is a mean that divides {how}, and each lane counts by its samples: this is not the mean "
                "over all tokens or weights of the step\n"
                "  fix: return (loss * count, count), where count is what the mean divides by, such as "
                "(labels != -100).sum()"
            )

    def _take_names(self, names: tuple[str, ...], lane: Lane) -> None:
        if self._seen_names is not None:
            raise ConfigError(
                f"the loss returned {', '.join(names)} for lane {lane.number}, and "
                f"{', '.join(self._seen_names)} for the lane before it",
                fix="return the same names for every batch",
            )
        self.names = self._seen_names = names

    def complete(self, count: float) -> None:
        """Divide the gradients of a loss that returned (sum, count)."""
        if not self._by_count:
            return
        refuse_no_count(count, self._step.plan.index)
        gradients = [value.grad for value in self._updates.parameters if value.grad is not None]
        divide([local_part(value) for value in gradients], torch.tensor(count, dtype=torch.float64))


def divide(gradients: list[Tensor], count: Tensor) -> None:
    """Divide gradients by a number. As a tensor on their device: CUDA multiplies by the reciprocal of another one."""
    for value in gradients:
        divisor = count.to(value.device)
        if value.dtype in {torch.float16, torch.bfloat16}:
            value.copy_(value.float() / divisor.float())
        else:
            value.div_(divisor.to(value.dtype))


class WholeBatchLoss(LaneWork):
    """One loss over the outputs of all samples of the step, in sample order.

    A first pass without gradients computes the outputs; the second one repeats it lane by lane, with the same random
    numbers, and continues the gradient of the loss. So memory is that of one lane, plus the outputs.
    """

    def prepare(
        self, over_batch: Callable[[Tensor], Tensor], buffers: MovingBuffers, lanes: int
    ) -> None:
        """Compute the loss, and its gradient with respect to every output."""
        self._sizes = split_evenly(self._step.plan.samples, lanes)
        rows = self._own_rows(buffers)
        whole = gather_rows(self._world, rows, self._sizes).requires_grad_()
        with self._updates.precision.context():
            value = over_batch(whole)
        self._value = float(lane_loss(value, 1).value)
        if not math.isfinite(self._value):
            raise self._not_finite(self._value, "over the whole batch")
        scaled = value * self._updates.precision.scale
        wanted = [whole, *self._updates.parameters]
        first, *others = torch.autograd.grad(scaled, wanted, allow_unused=True)
        self._gradient = torch.zeros_like(whole) if first is None else first
        self._direct = others

    def _own_rows(self, buffers: MovingBuffers) -> list[Tensor]:
        rows = []
        for _ in range(self._updates.sum.idle):
            with torch.no_grad():
                self._call(self._step.lanes[0])
            buffers.reset()
        for lane in self._step.lanes:
            with torch.no_grad():
                output = self._call(lane)
            buffers.reset()
            _check_rows(output, lane)
            rows.append(output[: lane.samples])
        return rows

    def forward(self, lane: Lane) -> tuple[Tensor, Tensor]:
        """Run a lane again; its gradient is the part of the loss's gradient for its rows."""
        output = self._call(lane)
        gradient = torch.zeros_like(output)
        begin = sum(self._sizes[: lane.number])
        gradient[: lane.samples] = self._gradient[begin : begin + lane.samples]
        is_first = lane.number == 0
        self.sums, self.counts = [self._value * is_first], [float(is_first)]
        return output, gradient

    def complete(self, count: float) -> None:
        """Add the gradients of parameters that the loss uses itself, such as a temperature: once, not per lane."""
        for parameter, gradient in zip(self._updates.parameters, self._direct, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def gather_rows(world: World, rows: list[Tensor], sizes: list[int]) -> Tensor:
    """Return the rows of all lanes, which have these sizes, in order. Every rank must call this."""
    own = torch.cat(rows)
    if world.size == 1:
        return own
    counts = []
    for rank in range(world.size):
        mine = share(len(sizes), rank, world.size)
        counts.append(sum(sizes[mine.start : mine.stop]))
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: len(own)] = own
    gathered = all_gather_rows(world, padded.view(torch.uint8)).view(own.dtype)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _check_rows(output: Any, lane: Lane) -> None:
    if not isinstance(output, Tensor) or output.ndim == 0 or len(output) < lane.samples:
        shape = (
            f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        )
        raise ConfigError(
            f"with over_batch=, the function of a lane must return one row per sample: got {shape} for {lane.samples} samples",
            fix="return a tensor whose first dimension is the number of samples",
        )
