"""One loss over the outputs of all samples of a step, such as a contrastive one: `run.update(..., over_batch=loss)`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.data.reading.batches import Lane
from paceline.errors import ConfigError
from paceline.exact.buffers import MovingBuffers
from paceline.exact.lanes import LaneLosses, LaneMemory, UpdateCall
from paceline.exact.loss import named_values, not_finite, single_number
from paceline.exact.optimizer import OptimizerUpdates
from paceline.scale.batch import share, split_evenly
from paceline.world.collectives import all_gather_rows
from paceline.world.world import World


class WholeBatchLoss(LaneLosses):
    """One loss over the outputs of all samples of the step, in sample order.

    A first pass without gradients computes the outputs; the second one repeats it lane by lane, with the same random
    numbers, and continues the gradient of the loss. So memory is that of one lane, plus the outputs.
    """

    def __init__(
        self, updates: OptimizerUpdates, call: UpdateCall, world: World, lanes: int
    ) -> None:
        super().__init__(updates, call, None)
        self._world, self._sizes = world, split_evenly(call.step.plan.samples, lanes)

    def prepare(self, memory: LaneMemory, buffers: MovingBuffers) -> None:
        """Compute the loss, and its gradient with respect to every output. Every rank must call this."""
        over_batch = self.call.over_batch
        assert over_batch is not None
        rows = self._own_rows(memory, buffers)
        whole = gather_rows(self._world, rows, self._sizes).requires_grad_()
        with self.updates.precision.context():
            value = over_batch(whole)
        output, _ = named_values(value)
        self._value = float(single_number("loss", output.detach()))
        if not math.isfinite(self._value):
            where = f"over the whole batch (rank {self._world.rank})"
            raise not_finite(self._value, self.call.step.plan.index, where)
        scaled = output * self.updates.precision.scale
        wanted = [whole, *self.updates.parameters]
        first, *others = torch.autograd.grad(scaled, wanted, allow_unused=True)
        self._gradient = torch.zeros_like(whole) if first is None else first
        self._direct = others

    def _call(self, batch: Any) -> Any:
        with self.updates.precision.context():
            return self.call.loss(batch)

    def _own_rows(self, memory: LaneMemory, buffers: MovingBuffers) -> list[Tensor]:
        rows = []
        for _ in range(self.updates.sum.extra_lanes):
            with torch.no_grad():
                self._call(memory.batch(0))
            buffers.reset()
        for row, lane in enumerate(self.call.step.lanes):
            with torch.no_grad():
                output = self._call(memory.batch(row))
            buffers.reset()
            _check_rows(output, lane)
            rows.append(output[: lane.samples])
        return rows

    def forward(self, lane: Lane, batch: Any) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        """Run a lane again; its gradient is the part of the loss's gradient for its rows."""
        output = self._call(batch)
        gradient = torch.zeros_like(output)
        begin = sum(self._sizes[: lane.number])
        gradient[: lane.samples] = self._gradient[begin : begin + lane.samples]
        is_first = float(lane.number == 0)
        return output, gradient, {"loss": (self._value * is_first, is_first)}

    def complete(self) -> None:
        """Add the gradients of parameters that the loss uses itself, such as a temperature: once, not per lane."""
        for parameter, gradient in zip(self.updates.parameters, self._direct, strict=True):
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
