"""The engine of `Run.update`: forward and backward lane by lane, one sum of gradients, one optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy
import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import Lane, RankBatch
from paceline.errors import ConfigError
from paceline.telemetry.phases import WAIT, PhaseClock
from paceline.train.gradients.gradient_sum import BucketedSum
from paceline.train.gradients.note import NO_MOVES, Moves, Note, RankRequests
from paceline.train.gradients.protocol import GradientSum
from paceline.train.model.unsupported import refuse_hooks, refuse_lonely_sample
from paceline.train.saving.state import NOTHING, load_state, python_numbers
from paceline.train.step.forward_writes import ForwardWrites
from paceline.train.step.lane_loss import Losses, LossFunction, means
from paceline.train.step.losses import LaneLosses, LaneSeeds, LaneWork, WholeBatchLoss
from paceline.train.step.moving_buffers import MovingBuffers
from paceline.train.step.optimizer_updates import OptimizerUpdates
from paceline.train.strategy import Strategy
from paceline.world.collectives import sum_across
from paceline.world.world import World

GetRequests = Callable[[], RankRequests]
"""Returns this rank's requests to save or to stop; called as late in an update as possible."""


class LaneTrace(Protocol):
    """Is told what the lanes of an update compute."""

    def begin_update(self) -> None:
        """Note what the body of the loop did before the update."""

    def lane(self, lane: Lane, output: Tensor) -> None:
        """Note the output, gradients and buffers of a lane."""

    def batch(self, number: int, sums: Tensor) -> None:
        """Note the sums of the metrics over one batch of an evaluation."""

    def summed(self) -> None:
        """Note the sum of the gradients over all ranks."""


class UpdateCall(NamedTuple):
    """What the user's loop asks for with `Run.update` or `Run.backward`."""

    optimizer: torch.optim.Optimizer
    loss: LossFunction
    step: RankBatch
    number: int
    """The number of the update in its step: each draws other random numbers."""
    clip_norm: float = 0.0
    over_batch: Callable[[Tensor], Tensor] | None = None


class Updates:
    """Runs the updates of a training, with the same bits on any number of ranks."""

    synchronized = False
    """Whether local SGD replicas were synchronized after the last step."""

    def __init__(
        self,
        world: World,
        config: RunConfig,
        strategy: Strategy,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        total_samples: int,
        get_requests: GetRequests,
    ) -> None:
        self._world, self._config, self._strategy = world, config, strategy
        self._total_samples, self._get_requests = total_samples, get_requests
        self.clock = PhaseClock()
        """Measures the time of each phase on this rank."""
        self.ready = 0.0
        """`time.perf_counter` at the end of this rank's own work in the last update."""
        # FSDP gathers weights during forward and backward, so both include waiting for other ranks.
        self._forward, self._backward = (WAIT, WAIT) if strategy.shards else ("forward", "backward")
        self.trace: LaneTrace | None = None
        """Notes what the lanes of this step compute, for `paceline verify`."""
        self._models = list(models)
        for model in models:
            refuse_hooks(model, config)
        self._buffers = self._make_buffers()
        # A single lane changes its parameters itself, as a plain loop does. FSDP swaps parameters during forward.
        is_shared = config.batch.lanes > 1 and not strategy.shards
        self._forward_writes = ForwardWrites(models, is_active=is_shared)
        self._optimizers: dict[torch.optim.Optimizer, OptimizerUpdates] = {}
        if strategy.shards:
            from paceline.train.gradients.sharded_sum import refuse_several
            from paceline.train.model.sharded_optimizer import refuse_unfit

            refuse_several(len(models), len(optimizers))
            refuse_unfit(optimizers[0])
        for optimizer in optimizers:
            self._optimizers[optimizer] = OptimizerUpdates(
                optimizer, models, config, world, strategy, self._make_sum
            )
        self._set_up()

    def _set_up(self) -> None:
        """Finish the construction of a subclass."""

    def _make_buffers(self) -> MovingBuffers:
        return MovingBuffers(self._models, self._config.batch.lanes, self._world)

    def _make_sum(self, parameters: list[nn.Parameter]) -> GradientSum:
        config, world, lanes = self._config, self._world, self._config.batch.lanes
        if not self._strategy.shards:
            names = {
                value: name for model in self._models for name, value in model.named_parameters()
            }
            return BucketedSum(
                parameters, lanes, world, self.clock,
                exact=config.exact, compression=config.compression, names=names,
            )  # fmt: skip
        from paceline.train.gradients.sharded_sum import FreeShardedSum, ShardedSum

        kind = ShardedSum if self._strategy.adds_shards else FreeShardedSum
        return kind(self._models[0], parameters, lanes, world)

    def close(self) -> None:
        """Free what would keep the ranks from leaving each other."""

    def of(self, optimizer: torch.optim.Optimizer) -> OptimizerUpdates:
        """Return the updates of an optimizer; raise if it was not registered."""
        if optimizer not in self._optimizers:
            raise ConfigError(
                f"this {type(optimizer).__name__} is not part of the run",
                fix="register it before run.steps(...): optimizer = run.optimizer(optimizer)",
            )
        return self._optimizers[optimizer]

    def refuse_backward(self) -> None:
        """Raise if gradients cannot be given to the user's code."""
        if self._config.precision == "fp16":
            raise ConfigError(
                "run.backward does not support precision=fp16, whose gradients are scaled and may overflow",
                fix="set precision=bf16, or call run.update",
            )

    @property
    def least_rate(self) -> float:
        """The smallest learning rate that all optimizers accept."""
        return max(updates.update.least_rate for updates in self._optimizers.values())

    # One update

    def update(self, call: UpdateCall) -> tuple[Losses, Note]:
        """Add the gradients of all lanes of all ranks, and change the weights; return mean losses and notes."""
        losses, note = self.backward(call)
        self.of(call.optimizer).apply(call.clip_norm)
        self.clock.enter("other")
        return losses, note

    def backward(self, call: UpdateCall) -> tuple[Losses, Note]:
        """Leave the gradients of all lanes of all ranks in `grad`; return the mean losses and the sum of the notes."""
        updates, step = self.of(call.optimizer), call.step
        updates.follow_freezing()
        if self.trace is not None:
            self.trace.begin_update()
        self.clock.begin_step()
        for model in self._models:
            updates.precision.begin(model)
        self._buffers.begin()
        self._forward_writes.begin()
        seeds = LaneSeeds(self._config.seed, call.number)
        lanes: LaneWork = LaneLosses(self._world, updates, call.loss, step, seeds)
        number = self._config.batch.lanes
        try:
            if call.over_batch is not None:
                lanes = WholeBatchLoss(self._world, updates, call.loss, step, seeds)
                lanes.prepare(call.over_batch, self._buffers, number)
            total = self._run_lanes(updates, lanes, step)
        except ValueError as error:
            refuse_lonely_sample(error, self._models, step.plan, number)
            raise
        for model in self._models:
            updates.precision.finish(model)
        losses = self._finish(lanes, step, total)
        if self.trace is not None:
            self.trace.summed()
        return losses, total

    def _run_lanes(self, updates: OptimizerUpdates, lanes: LaneWork, step: RankBatch) -> Note:
        """Run forward and backward of this rank's lanes; return the sum of the notes of all ranks."""
        updates.sum.begin()
        self.clock.enter(self._forward)
        for _ in range(updates.sum.idle):
            lanes.run_idle(step.lanes[0])
            self._buffers.reset()
        for lane in step.lanes[:-1]:
            self._run_lane(updates, lanes, lane, last=False)
            updates.sum.after_lane()
            self.clock.enter(self._forward)
        self._run_lane(updates, lanes, step.lanes[-1], last=True)
        total = updates.sum.finish()
        self.clock.enter("optimizer")
        return total

    def _run_lane(
        self, updates: OptimizerUpdates, lanes: LaneWork, lane: Lane, *, last: bool
    ) -> None:
        output, gradient = self._forward_writes.examined(lambda: lanes.forward(lane))
        is_plain = not self._buffers.any and len(lanes.names) == 1
        others = NO_MOVES if is_plain else self._other_numbers(lanes, lane, last=last)
        note = Note(lanes.sums[0], lanes.counts[0], others)
        if last:
            note = note.with_requests(self._get_requests())
            self.ready = time.perf_counter()
        updates.sum.before_lane(note, last=last)
        self.clock.enter(self._backward)
        updates.run_backward(output, gradient)
        if self.trace is not None:
            self.trace.lane(lane, output)
        self._buffers.reset()

    def _other_numbers(self, lanes: LaneWork, lane: Lane, *, last: bool) -> Moves:
        """Return what a note holds beside the loss: other values of the loss, then changes of buffers."""
        moves = self._buffers.moves_of_lane(lane.batch, counts=lane.samples > 0)
        is_new = float(last and self._buffers.found_new)
        return numpy.concatenate([lanes.sums[1:], lanes.counts[1:], [is_new], moves])

    def _finish(self, lanes: LaneWork, step: RankBatch, total: Note) -> Losses:
        """Apply what the notes say: buffers, counts, mean losses."""
        others = len(lanes.names) - 1
        numbers, moves = total.moves[: 2 * others].tolist(), total.moves[2 * others :]
        if self._buffers.any:
            lanes_with_samples = min(step.plan.samples, self._config.batch.lanes)
            self._buffers.apply(moves[1:], lanes_with_samples, any_new=bool(moves[0]))
        sums = [float(total.loss), *numbers[:others]]
        counts = [float(total.counted), *numbers[others:]]
        lanes.complete(counts[0])
        return means(lanes.names, sums, counts)

    @property
    def without_gradient(self) -> list[str]:
        """The names of the parameters that no update has given a gradient; unknown with local SGD."""
        if self._strategy.replicas:
            return []
        return [name for each in self._optimizers.values() for name in each.without_gradient]

    def take_averaged_buffers(self) -> list[str]:
        """Return the names of buffers that change by the mean of the lanes' changes: outside of torch's classes, each once."""
        names, self._buffers.named = self._buffers.named, []
        return names

    # What a checkpoint holds

    def unsaved_buffers(self) -> dict[str, Tensor]:
        """Return the moving buffers that are not in the models' state_dict, by name."""
        return self._buffers.not_persistent()

    def own_state(self) -> Mapping[str, Tensor]:
        """Return state that only this rank holds, beside that of models and optimizers."""
        return NOTHING

    def numbers(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """Return the entries of the optimizers' state that are Python numbers, with their types."""
        return python_numbers(optimizer, model)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: Iterator[tuple[str, Tensor]],
        numbers: Mapping[str, str],
        is_saved: Callable[[str], bool],
    ) -> list[str]:
        """Restore saved tensors; return a line for each that does not match."""
        rest = self._take_buffers(saved)
        return load_state(model, optimizer, rest, numbers, is_saved)

    def _take_buffers(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Restore the buffers that `unsaved_buffers` returned, and pass the other tensors on."""
        for name, value in tensors:
            if not self._buffers.restore_one(name, value):
                yield name, value

    def precision_state(self) -> list[list[float]]:
        """Return the fp16 scale of each optimizer."""
        return [updates.precision.state() for updates in self._optimizers.values()]

    def restore_precision(self, states: list[list[float]]) -> None:
        """Continue with saved fp16 scales."""
        for updates, state in zip(self._optimizers.values(), states, strict=False):
            updates.precision.restore(state)

    # Sums over ranks

    @property
    def totals_are_global(self) -> bool:
        """Whether notes are summed over all ranks already."""
        return True

    def agree(self, note: Note) -> Note:
        """Return the sum of a note over all ranks. Every rank must call this."""
        return Note.from_tensor(self.sum_over_ranks(note.to_tensor()))

    def total(self, note: Note) -> Note:
        """Return the sum of the notes of some updates over all ranks. Every rank must call this."""
        return note if self.totals_are_global else self.agree(note)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks. Every rank must call this."""
        with self.clock.waiting():
            return sum_across(self._world, values)
