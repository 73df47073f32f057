"""One optimizer step: every lane's forward and backward, one sum over all ranks, one change of the weights.

The order of an update, which is the same on every rank:

1. `_run_lanes`: seed the generators for a lane, forward, write its row (loss, count, changes of buffers), backward. The
   backward of a rank's last lane sends gradients bucket by bucket; so its row, with the requests of this rank, is
   complete before that. Buffers are reset after each lane: all lanes start from the same ones.
2. The sum along the tree ends up in `grad`, and the total of the rows on the device.
3. `read`: the host reads the head of the total, once. A loss that is not finite ends the update here, on every rank,
   before anything has changed.
4. `finish_gradients`: each buffer changes by its rule, such as the mean of the lanes' changes; gradients of a loss by count are divided.
5. `OptimizerUpdates.apply`: clip, and the optimizer's step.

A CUDA graph (`graph.py`) records 1 and 2, and 4 and 5, by calling these functions. Local SGD (`local_sgd.py`) runs them
once per replica.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import Lane
from paceline.errors import ConfigError
from paceline.exact.buckets import BucketedSum
from paceline.exact.buffers import MovingBuffers
from paceline.exact.forward_writes import ForwardWrites
from paceline.exact.lanes import LaneLosses, LaneMemory, UpdateCall
from paceline.exact.loss import Losses, refuse_no_count
from paceline.exact.optimizer import GradientSum, OptimizerUpdates, divide
from paceline.exact.row import Layout, RankRequests, Rows, StepLanes, StepSums
from paceline.exact.sharded_tensor import local_part
from paceline.exact.state import NOTHING, load_state, python_numbers
from paceline.exact.strategy import Strategy
from paceline.exact.unsupported import refuse_hooks, refuse_lonely_sample
from paceline.exact.whole_batch import WholeBatchLoss
from paceline.telemetry.phases import WAIT, PhaseClock
from paceline.world.collectives import all_gather_texts, sum_across
from paceline.world.world import World

GetRequests = Callable[[], RankRequests]
"""Returns this rank's requests to save or to stop; called as late in an update as possible."""


class LaneObserver(Protocol):
    """Is told what the lanes of an update compute."""

    def begin_update(self) -> None:
        """Note what the body of the loop did before the update."""

    def lane(self, lane: Lane, output: Tensor) -> None:
        """Note the output, gradients and buffers of a lane."""

    def batch(self, number: int, sums: Tensor) -> None:
        """Note the sums of the metrics over one batch of an evaluation."""

    def summed(self) -> None:
        """Note the sum of the gradients over all ranks."""


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
        rules: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.world, self.config, self._strategy = world, config, strategy
        self._total_samples, self._get_requests = total_samples, get_requests
        self._device = torch.device(world.device)
        self.clock = PhaseClock()
        """Measures the time of each phase on this rank."""
        self.ready = 0.0
        """`time.perf_counter` at the end of this rank's own work in the last update."""
        # FSDP gathers weights during forward and backward, so both include waiting for other ranks.
        self._forward, self._backward = (WAIT, WAIT) if strategy.shards else ("forward", "backward")
        self.observer: LaneObserver | None = None
        """Is told what the lanes of this step compute."""
        self.models = list(models)
        for model in models:
            refuse_hooks(model, config)
        self.buffers = self._make_buffers(rules)
        # A single lane changes its parameters itself, as a plain loop does. FSDP swaps parameters during forward.
        is_shared = config.batch.lanes > 1 and not strategy.shards
        self._forward_writes = ForwardWrites(models, is_active=is_shared)
        self._optimizers: dict[torch.optim.Optimizer, OptimizerUpdates] = {}
        if strategy.shards:
            from paceline.exact.sharded_optimizer import refuse_unfit
            from paceline.exact.shards import refuse_several

            refuse_several(len(models), len(optimizers))
            refuse_unfit(optimizers[0])
        for optimizer in optimizers:
            self._optimizers[optimizer] = OptimizerUpdates(
                optimizer, models, config, world, strategy, self._make_sum
            )
        self._set_up()

    def _set_up(self) -> None:
        """Finish the construction of a subclass."""

    def _make_buffers(self, rules: Sequence[Mapping[str, str]]) -> MovingBuffers:
        return MovingBuffers(self.models, self.config.batch.lanes, self.world, rules)

    def _make_sum(self, parameters: list[nn.Parameter]) -> GradientSum:
        config, world, lanes = self.config, self.world, self.config.batch.lanes
        if not self._strategy.shards:
            names = {
                value: name for model in self.models for name, value in model.named_parameters()
            }
            return BucketedSum(
                parameters, lanes, world, self.clock,
                exact=config.exact, compression=config.compression, names=names,
            )  # fmt: skip
        from paceline.exact.shards import FreeShardedSum, ShardedSum

        kind = ShardedSum if self._strategy.adds_shards else FreeShardedSum
        return kind(self.models[0], parameters, lanes, world)

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
        if self.config.precision == "fp16":
            raise ConfigError(
                "run.backward does not support precision=fp16, whose gradients are scaled and may overflow",
                fix="set precision=bf16, or call run.update",
            )

    @property
    def least_rate(self) -> float:
        """The smallest learning rate that all optimizers accept."""
        return max(updates.least_rate for updates in self._optimizers.values())

    # One update

    def update(self, call: UpdateCall) -> tuple[Losses, StepSums]:
        """Add the gradients of all lanes of all ranks, and change the weights; return mean losses and sums."""
        found = self.backward(call)
        self.of(call.optimizer).apply(call.clip_norm)
        self.clock.enter("other")
        return found

    def backward(self, call: UpdateCall) -> tuple[Losses, StepSums]:
        """Leave the gradients of all lanes of all ranks in `grad`; return mean losses and sums."""
        updates, step = self.of(call.optimizer), call.step
        updates.follow_freezing()
        if self.observer is not None:
            self.observer.begin_update()
        self.clock.begin_step()
        self.buffers.begin()
        self._forward_writes.begin()
        memory = LaneMemory(updates, call, self.config.seed)
        with self._rounded_weights(updates):
            try:
                work = self._lane_work(updates, call, memory)
                rows = self._run_lanes(work, memory)
                total = updates.sum.finish()
            except ValueError as error:
                refuse_lonely_sample(error, self.models, step.plan, self.config.batch.lanes)
                raise
        self.clock.enter("optimizer")
        numbers = self.read(call, rows, total)
        self.finish_gradients(updates, call, rows, total)
        self.apply_new_buffers(call, rows, numbers)
        work.complete()
        if self.observer is not None:
            self.observer.summed()
        return rows.losses(numbers), rows.step_sums(numbers)

    @contextlib.contextmanager
    def _rounded_weights(self, updates: OptimizerUpdates) -> Iterator[None]:
        """Compute with weights in the number format of the precision."""
        for model in self.models:
            updates.precision.begin(model)
        yield
        for model in self.models:
            updates.precision.finish(model)

    def _lane_work(
        self, updates: OptimizerUpdates, call: UpdateCall, memory: LaneMemory
    ) -> LaneLosses:
        if call.over_batch is not None:
            whole = WholeBatchLoss(updates, call, self.world, self.config.batch.lanes)
            whole.prepare(memory, self.buffers)
            return whole
        is_examined = updates.checks.is_due and self.world.is_main
        return LaneLosses(updates, call, updates.checks if is_examined else None)

    def _run_lanes(self, work: LaneLosses, memory: LaneMemory) -> Rows:
        """Run forward and backward of this rank's lanes; return their rows. The gradients are not summed yet."""
        updates, lanes = work.updates, work.call.step.lanes
        updates.sum.begin()
        self.clock.enter(self._forward)
        for _ in range(updates.sum.extra_lanes):
            self._run_extra_lane(work, lanes[0], memory)
        rows: Rows | None = None
        for row, lane in enumerate(lanes):
            is_last = row == len(lanes) - 1
            output, gradient, values = self._run_forward(work, lane, row, memory)
            if rows is None:
                rows = memory.rows(Layout.of(values, self.buffers.columns, self.buffers.largest))
            self._write_row(rows, row, values, lane, work.call, examines=not memory.is_recorded)
            if is_last:
                rows.complete()
            if is_last and not memory.is_recorded:
                rows.set_requests(self._get_requests())
                self.ready = time.perf_counter()
            updates.sum.before_lane(rows, last=is_last and memory.sends)
            self.clock.enter(self._backward)
            updates.run_backward(output, gradient)
            if self.observer is not None:
                self.observer.lane(lane, output)
            self.buffers.reset(only_known=memory.is_recorded)
            if not is_last:
                updates.sum.after_lane()
                self.clock.enter(self._forward)
        assert rows is not None  # every rank has a lane
        return rows

    def _run_forward(
        self, work: LaneLosses, lane: Lane, row: int, memory: LaneMemory
    ) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        if memory.is_recorded:
            return work.forward(lane, memory.batch(row))
        return self._forward_writes.examined(lambda: work.forward(lane, memory.batch(row)))

    def _run_extra_lane(self, work: LaneLosses, lane: Lane, memory: LaneMemory) -> None:
        """Run a lane whose gradient is not used: ranks with one lane more must gather this rank's shards."""
        output, gradient, _ = work.forward(lane, memory.batch(0))
        torch.autograd.backward(output, torch.zeros_like(gradient))
        work.updates.sum.after_lane()
        self.buffers.reset()

    def _write_row(
        self,
        rows: Rows,
        row: int,
        values: Mapping[str, Any],
        lane: Lane,
        call: UpdateCall,
        *,
        examines: bool,
    ) -> None:
        """Write what the forward of a lane returned, and how it changed buffers."""
        rows.write(row, values, lane)
        if self.buffers.every:
            layout, numbers, counts = rows.layout, rows.numbers[row], lane.samples > 0
            is_last = lane.number == self._lanes_with_samples(call) - 1
            flag = numbers[layout.buffer]
            self.buffers.take(numbers[layout.head :], flag, counts=counts, is_last=is_last)
            if examines:
                self.buffers.examine(lane.batch, flag, counts=counts)

    def read(self, call: UpdateCall, rows: Rows, total: Tensor) -> list[float]:
        """Return the head of the total on the host; raise, before anything has changed, if the loss is no number."""
        layout = rows.layout
        numbers: list[float] = total[: layout.head].tolist()
        if not math.isfinite(numbers[0]):
            # All ranks that add these rows are here, and the one that has the lane tells the others.
            lanes = StepLanes.of(call.step, self.world.rank)
            texts = [lanes.not_finite(rows.loss_of_lanes())]
            if self.totals_are_global:
                texts = all_gather_texts(self.world, texts[0])
            found = next(filter(None, texts), f"{numbers[0]} the sum over all lanes")
            raise lanes.error(found, "before the update")
        if layout.by_count:
            refuse_no_count(numbers[layout.counts], call.step.plan.index)
        self.of(call.optimizer).sum.drop_missing(numbers[layout.missing])
        if numbers[layout.buffer]:
            self.buffers.refuse_too_large(total[layout.head :])
        with_samples = self._lanes_with_samples(call)
        self.buffers.refuse_miscounts(total[layout.head :], with_samples)
        return numbers

    def apply_new_buffers(self, call: UpdateCall, rows: Rows, numbers: list[float]) -> None:
        """Change the buffers that have no columns in these rows. Every rank must call this."""
        if numbers[rows.layout.buffer]:
            self.buffers.apply_new(self._lanes_with_samples(call))

    def run_captured_lanes(self, work: LaneLosses, memory: LaneMemory) -> Rows:
        """Run the lanes that a CUDA graph records, or is compared with."""
        with self._rounded_weights(work.updates):
            return self._run_lanes(work, memory)

    def _lanes_with_samples(self, call: UpdateCall) -> int:
        return min(call.step.plan.samples, self.config.batch.lanes)

    def prepare_finish(self, call: UpdateCall, rows: Rows) -> None:
        """Make what `finish_gradients` needs, before a CUDA graph records it."""
        self.buffers.divisor(self._lanes_with_samples(call), rows.numbers)

    def finish_gradients(
        self, updates: OptimizerUpdates, call: UpdateCall, rows: Rows, total: Tensor
    ) -> None:
        """Change the buffers, and divide the gradients of a loss that returned (sum, count)."""
        layout = rows.layout
        if self.buffers.columns:
            self.buffers.apply(total[layout.head :], self._lanes_with_samples(call))
        if layout.by_count and call.over_batch is None:
            gradients = [value.grad for value in updates.parameters if value.grad is not None]
            divide([local_part(value) for value in gradients], total[layout.counts])

    @property
    def without_gradient(self) -> list[str]:
        """The names of the parameters that no update has given a gradient; unknown with local SGD."""
        if self._strategy.replicas:
            return []
        return [name for each in self._optimizers.values() for name in each.without_gradient]

    def take_averaged_buffers(self) -> list[str]:
        """Return the names of buffers that change by the mean of the lanes' changes: outside of torch's classes, each once."""
        names, self.buffers.named = self.buffers.named, []
        return names

    # What a checkpoint holds

    def unsaved_buffers(self) -> dict[str, Tensor]:
        """Return the moving buffers that are not in the models' state_dict, by name."""
        return self.buffers.not_persistent()

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
            if not self.buffers.restore_one(name, value):
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
        """Whether the sums of a step are over all ranks already."""
        return True

    def agree(self, sums: StepSums) -> StepSums:
        """Return the sum over all ranks. Every rank must call this."""
        return StepSums(*self.sum_over_ranks(sums.to_tensor()).tolist())

    def total(self, sums: StepSums) -> StepSums:
        """Return the sums of some updates over all ranks. Every rank must call this."""
        return sums if self.totals_are_global else self.agree(sums)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks. Every rank must call this."""
        with self.clock.waiting():
            return sum_across(self.world, values)


class StepEngine(Protocol):
    """What runs the steps of a training, as its observers see it."""

    clock: PhaseClock
    """Measures the time of each phase on this rank."""
    ready: float
    """`time.perf_counter` at the end of this rank's own work in the last step."""
    synchronized: bool
    """Whether local SGD replicas were synchronized after the last step."""

    @property
    def totals_are_global(self) -> bool:
        """Whether a step returns sums over all ranks already."""

    def total(self, sums: StepSums) -> StepSums:
        """Return sums over all ranks. Every rank must call this."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks. Every rank must call this."""
