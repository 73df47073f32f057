"""The engine of `Run.update`: forward and backward lane by lane, one sum of gradients, one optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import Lane, RankBatch
from paceline.errors import ConfigError
from paceline.telemetry.phases import PhaseClock
from paceline.train.gradient_sum import GradientSum
from paceline.train.lane_loss import Losses, LossFunction, means
from paceline.train.losses import LaneLosses, LaneSeeds, LaneWork, WholeBatchLoss
from paceline.train.moving_buffers import MovingBuffers
from paceline.train.note import Note, RankRequests
from paceline.train.optimizer_step import clip
from paceline.train.parallel import shards
from paceline.train.precision import Precision
from paceline.world.collectives import sum_across
from paceline.world.world import World

if TYPE_CHECKING:  # slow to import, and most trainings do not need it
    from paceline.train.sharded_sum import ShardedSum

GetRequests = Callable[[], RankRequests]
"""Returns this rank's requests to save or to stop."""


class OptimizerUpdates:
    """The updates of one optimizer: its parameters, their gradient sum, its fp16 scale."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: Sequence[nn.Module],
        world: World,
        config: RunConfig,
        clock: PhaseClock,
    ) -> None:
        self.optimizer = optimizer
        own = [value for group in optimizer.param_groups for value in group["params"]]
        self.parameters = [value for value in own if value.requires_grad]
        self.precision = Precision(config, world.device, world.size)
        self.sum = self._make_sum(models, world, config, clock)
        trainable = {
            value for model in models for value in model.parameters() if value.requires_grad
        }
        self._inputs = None if trainable <= set(self.parameters) else self.parameters

    def _make_sum(
        self, models: Sequence[nn.Module], world: World, config: RunConfig, clock: PhaseClock
    ) -> GradientSum | ShardedSum:
        lanes = config.batch.lanes
        if not shards(world, config):
            return GradientSum(self.parameters, lanes, world, clock, exact=config.exact)
        from paceline.train.sharded_sum import ShardedSum

        return ShardedSum(models[0], self.parameters, lanes, world)

    def run_backward(self, output: Tensor, gradient: Tensor) -> None:
        """Compute the gradients of this optimizer's parameters; those of others stay as they are."""
        torch.autograd.backward(output, gradient, inputs=self._inputs)


class Updates:
    """Runs the updates of a training, with the same bits on any number of ranks."""

    synchronized = False
    totals_are_global = True

    def __init__(self, world: World, config: RunConfig, get_requests: GetRequests) -> None:
        self._world, self._config, self._get_requests = world, config, get_requests
        self.clock = PhaseClock()
        """Measures the time of each phase on this rank."""
        self.ready = 0.0
        """`time.perf_counter` at the end of this rank's own work in the last update."""
        self._models: list[nn.Module] = []
        self._buffers = MovingBuffers([], config.batch.lanes, world)
        self._optimizers: dict[torch.optim.Optimizer, OptimizerUpdates] = {}

    def set_up(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Prepare for the first update of these models by these optimizers."""
        if shards(self._world, self._config):
            from paceline.train.sharded_sum import refuse_several

            refuse_several(len(models), len(optimizers))
        self._models = list(models)
        self._buffers = MovingBuffers(models, self._config.batch.lanes, self._world)
        for optimizer in optimizers:
            self._optimizers[optimizer] = OptimizerUpdates(
                optimizer, models, self._world, self._config, self.clock
            )

    def of(self, optimizer: torch.optim.Optimizer) -> OptimizerUpdates:
        """Return the updates of an optimizer; raise if it was not registered."""
        if optimizer not in self._optimizers:
            raise ConfigError(
                f"this {type(optimizer).__name__} is not part of the run",
                fix="register it before run.steps(...): optimizer = run.optimizer(optimizer)",
            )
        return self._optimizers[optimizer]

    def backward(
        self,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: RankBatch,
        number: int,
        over_batch: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Losses, Note]:
        """Leave the gradients of all lanes of all ranks in `grad`; return the mean losses and the sum of the notes.

        `number` counts the updates of the step: each draws other random numbers.
        """
        updates = self.of(optimizer)
        for model in self._models:
            updates.precision.begin(model)
        self._buffers.begin()
        seeds = LaneSeeds(self._config.seed, number)
        lanes: LaneWork = LaneLosses(self._world, updates, loss, step, seeds)
        if over_batch is not None:
            lanes = WholeBatchLoss(self._world, updates, loss, step, seeds)
            lanes.prepare(over_batch, self._buffers, self._config.batch.lanes)
        total = self._run_lanes(updates, lanes, step)
        for model in self._models:
            updates.precision.finish(model)
        return self._finish(updates, lanes, step, total), total

    def _run_lanes(self, updates: OptimizerUpdates, lanes: LaneWork, step: RankBatch) -> Note:
        """Run forward and backward of this rank's lanes; return the sum of the notes of all ranks."""
        updates.sum.begin()
        for _ in range(updates.sum.idle):
            lanes.run_idle(step.lanes[0])
            self._buffers.reset()
        for lane in step.lanes[:-1]:
            updates.sum.after_lane(self._run_lane(updates, lanes, lane, last=False))
        note = self._run_lane(updates, lanes, step.lanes[-1], last=True)
        total = updates.sum.finish(note.with_requests(self._get_requests()))
        self.clock.enter("optimizer")
        return total

    def _run_lane(
        self, updates: OptimizerUpdates, lanes: LaneWork, lane: Lane, *, last: bool
    ) -> Note:
        self.clock.enter("forward")
        output, gradient = lanes.forward(lane)
        updates.sum.before_lane(last=last)
        self.clock.enter("backward")
        if last:
            self.ready = time.perf_counter()
        updates.run_backward(output, gradient)
        moves = self._buffers.after_lane(counts=lane.samples > 0)
        head = [float(last and self._buffers.found_new), *lanes.sums, *lanes.counts]
        numbers = numpy.concatenate([head, moves])
        return Note(lanes.sums[0], lanes.counts[0], numbers)

    def _finish(
        self, updates: OptimizerUpdates, lanes: LaneWork, step: RankBatch, total: Note
    ) -> Losses:
        """Apply what the notes say: buffers, counts, mean losses."""
        values = len(lanes.names)
        new_buffers, numbers, moves = total.moves[0], total.moves[1:], total.moves[1 + 2 * values :]
        lanes_with_samples = min(step.plan.samples, self._config.batch.lanes)
        self._buffers.apply(moves, lanes_with_samples, any_new=bool(new_buffers))
        sums, counts = numbers[:values].tolist(), numbers[values : 2 * values].tolist()
        lanes.complete(counts[0])
        return means(lanes.names, sums, counts)

    def apply(self, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
        """Clip the gradients and change the weights; fp16 gradients that overflowed change nothing."""
        updates = self.of(optimizer)
        gradients = [value.grad for value in updates.parameters if value.grad is not None]
        if updates.precision.unscale(gradients):
            if clip_norm:
                clip([value for value in updates.parameters if value.grad is not None], clip_norm)
            optimizer.step()
        self.clock.enter("other")

    def unsaved_buffers(self) -> dict[str, Tensor]:
        """Return the moving buffers that are not in the models' state_dict, by name."""
        return self._buffers.not_persistent()

    def take_unsaved_buffers(
        self, tensors: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Restore the buffers that `unsaved_buffers` returned, and pass the other tensors on."""
        for name, value in tensors:
            if not self._buffers.restore_one(name, value):
                yield name, value

    def precision_state(self) -> list[list[float]]:
        """Return the fp16 scale of each optimizer."""
        return [updates.precision.state() for updates in self._optimizers.values()]

    def restore_precision(self, states: list[list[float]]) -> None:
        """Continue with saved fp16 scales."""
        if states and not isinstance(states[0], list):
            states = [states]  # of a Trainer, which has one
        for updates, state in zip(self._optimizers.values(), states, strict=False):
            updates.precision.restore(state)

    def agree(self, note: Note) -> Note:
        """Return the sum of a note over all ranks. Every rank must call this."""
        return Note.from_tensor(self.sum_over_ranks(note.to_tensor()))

    def total(self, note: Note) -> Note:
        """Return a note as it is: it is summed over all ranks already."""
        return note

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks. Every rank must call this."""
        with self.clock.waiting():
            return sum_across(self._world, values)
