"""One optimizer step: forward and backward lane by lane, one gradient sum, one update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import Lane, RankBatch
from paceline.errors import ConfigError, TrainingError
from paceline.scale.lr import schedule_factor
from paceline.telemetry.phases import WAIT, PhaseClock
from paceline.train.buffers import MovingBuffers, find_moving_buffers
from paceline.train.ddp_reduction import TreeReduction
from paceline.train.lane_sum import FreeSum, gradients_of
from paceline.train.note import Note, RankRequests
from paceline.train.parallel import inner, lane_sum, shards
from paceline.train.precision import Precision
from paceline.train.sharded_tensor import clip_sharded, is_sharded, local_part
from paceline.train.state import NOTHING, load_state, python_numbers
from paceline.train.update import make_update
from paceline.world.collectives import sum_across
from paceline.world.randomness import seed_everything
from paceline.world.world import World

LossFunction = Callable[..., Tensor | tuple[Tensor, Tensor | int]]
"""loss(outputs, target) -> the mean over the samples; or (sum, count), for tokens of ragged lengths."""

GetRequests = Callable[[], RankRequests]
"""Returns this rank's requests; called as late in the step as possible."""


class OptimizerStep:
    """Each call is one optimizer step, with the same bits on any number of ranks."""

    synchronized = False
    """Whether local SGD replicas were synchronized after the last step."""
    _is_local_sgd = False

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        config: RunConfig,
        total_samples: int = 0,
    ) -> None:
        if bool(config.local_sgd.steps) is not self._is_local_sgd:
            raise ConfigError(
                f"{type(self).__name__} does not support local_sgd.steps={config.local_sgd.steps}",
                fix="train with `paceline.Trainer`, or set local_sgd.steps=0",
            )
        self._world, self._model, self._inner = world, model, inner(model)
        self._optimizer, self._config = optimizer, config
        self._loss: LossFunction = torch.compile(loss, dynamic=False) if config.compile else loss
        self._total_samples = total_samples
        self._sum = lane_sum(model, world, config)
        self._trainable = [value for value in self._inner.parameters() if value.requires_grad]
        self._peak_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._update_weights = make_update(optimizer, config, world.device)
        self._rate_now = math.nan  # so that the first step sets all rates
        self.precision = Precision(config, world.device, world.size)
        self._by_count = False
        self._buffers: MovingBuffers | None = None
        self._seeds: dict[float, Tensor] = {}
        self.clock = PhaseClock()
        """Measures the time of each phase on this rank."""
        if isinstance(self._sum, TreeReduction):
            self._sum.clock = self.clock
        # FSDP gathers weights during forward and backward, so both include waiting for other ranks.
        self._includes_waits = shards(world, config)
        self.ready = 0.0
        """`time.perf_counter` at the end of this rank's own work in the last step; afterwards it waits for others."""
        self._set_up()

    def _set_up(self) -> None:
        """Finish the construction of a subclass."""

    def __call__(self, step: RankBatch, get_requests: GetRequests | None = None) -> Note:
        """Compute this rank's lanes, add those of all other ranks, and update the weights.

        The note holds the sums that this rank knows; `total` adds them over all ranks. The requests of
        `get_requests` are counted in the note.
        """
        is_first = self._buffers is None
        self.clock.begin_step()
        self._enter("forward")
        self.precision.begin(self._inner)
        buffers = self._buffers = self._buffers or self._find_buffers(step)
        self._sum.begin()
        buffers.begin()
        for _ in range(self._sum.idle):
            self._run_idle_lane(step, buffers)
        for lane in step.lanes[:-1]:
            self._run_lane(step, lane, buffers)
        totals = self._run_last_lane(step, get_requests)
        self.clock.enter("optimizer")
        self.precision.finish(self._inner)
        if is_first:  # a missing gradient makes DDP hang, but not one rank: it is an error for both
            gradients_of(self._trainable)
        self._update(step, totals)
        self.clock.enter("other")
        return totals

    def _enter(self, phase: str) -> None:
        self.clock.enter(WAIT if self._includes_waits else phase)

    def _run_idle_lane(self, step: RankBatch, buffers: MovingBuffers) -> None:
        """Run a lane whose gradient is not used: ranks with one lane more must gather this rank's shards."""
        output, _ = self._forward(self._model, step, step.lanes[0])
        torch.autograd.backward(output, torch.zeros_like(output))
        buffers.restore()

    def _run_lane(self, step: RankBatch, lane: Lane, buffers: MovingBuffers) -> None:
        output, note = self._forward(self._inner, step, lane)
        self._sum.before_lane(note)
        self._enter("backward")
        torch.autograd.backward(output, self._seed_for(step, lane))
        self._sum.after_lane()
        buffers.restore()
        self._enter("forward")

    def _run_last_lane(self, step: RankBatch, get_requests: GetRequests | None) -> Note:
        """Run the lane whose backward reduces across ranks; return the sum of the notes."""
        output, note = self._forward(self._model, step, step.lanes[-1])
        if get_requests is not None:
            note = note.with_requests(get_requests())
        self._sum.before_lane(note)
        self.ready = time.perf_counter()
        self._backward_and_reduce(output, self._seed_for(step, step.lanes[-1]))
        return self._sum.finish()

    def _backward_and_reduce(self, output: Tensor, seed: Tensor) -> None:
        """Run a backward that reduces across ranks; the clock counts its waiting as waiting."""
        self._enter("backward")
        if isinstance(self._sum, FreeSum) and self._world.size > 1:
            # Callbacks run in order, so this one runs before the one in which DDP waits.
            output.register_hook(lambda _: _ENGINE.queue_callback(self.clock.bucket_ready))  # type: ignore[no-untyped-call]
        torch.autograd.backward(output, seed)
        self.clock.bucket_ready()

    def total(self, note: Note) -> Note:
        """Return the sum of a note over all ranks. Every rank must call this."""
        with self.clock.waiting():
            return self._sum.total(note)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks. Every rank must call this."""
        with self.clock.waiting():
            return sum_across(self._world, values)

    @property
    def totals_are_global(self) -> bool:
        """Whether a step returns sums over all ranks already."""
        return self._sum.totals_are_global

    def own_state(self) -> Mapping[str, Tensor]:
        """Return state that only this rank holds, beside that of model and optimizer."""
        return NOTHING

    def numbers(self) -> dict[str, str]:
        """Return the entries of the optimizer's state that are Python numbers, with their types."""
        return python_numbers(self._optimizer, self._model)

    def load(self, saved: Iterable[tuple[str, Tensor]], numbers: Mapping[str, str]) -> list[str]:
        """Restore saved tensors; return a line for each that does not match."""
        return load_state(self._model, self._optimizer, saved, numbers)

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return self._peak_rates[0] * self._rate_now

    def _forward(self, model: nn.Module, step: RankBatch, lane: Lane) -> tuple[Tensor, Note]:
        """Run one lane; return the tensor to start backward from, and the lane's note."""
        assert self._buffers is not None
        seed_everything(self._config.seed, step.plan.index, lane.number)
        *inputs, target = lane.batch
        with self.precision.context():
            result = self._loss(model(*inputs), target)
        self._by_count = isinstance(result, tuple)
        if isinstance(result, tuple):
            output, count = result[0], float(result[1])
        else:
            output, count = result, float(lane.samples)
        value = output.item()
        if not math.isfinite(value):
            raise self._not_finite(value, step.plan.index, lane.number)
        has_samples = lane.samples > 0
        moves = self._buffers.move_of_lane(counts=has_samples)
        if not has_samples:
            return output, Note(0.0, 0.0, moves)
        return output, Note(value if self._by_count else value * count, count, moves)

    def _seed_for(self, step: RankBatch, lane: Lane) -> Tensor:
        """Return the gradient to start backward with: the lane's weight in the mean over the step's samples.

        If the loss returns a count, the weight needs the sum over all lanes: gradients are divided at the end.
        """
        weight = (
            self._sum.scale
            * self.precision.scale
            * (lane.samples > 0 if self._by_count else lane.samples / step.plan.samples)
        )
        if weight not in self._seeds:
            self._seeds[weight] = torch.tensor(weight, device=self._world.device)
        return self._seeds[weight]

    def _update(self, step: RankBatch, totals: Note) -> None:
        assert self._buffers is not None
        if self._by_count or len(totals.moves):
            with self.clock.waiting():
                totals = self._sum.total(totals)
        if self._by_count:
            if not totals.counted:
                raise self._nothing_counted(step)
            gradients = [local_part(value) for value in gradients_of(self._trainable)]
            torch._foreach_div_(gradients, totals.counted)
        self._buffers.apply(totals.moves, min(step.plan.samples, self._config.batch.lanes))
        self._set_rate(step)
        if self.precision.unscale(gradients_of(self._trainable)):
            self._apply()

    def _apply(self) -> None:
        """Clip the gradients and change the weights."""
        if self._config.clip_norm:
            clip(self._trainable, self._config.clip_norm)
        self._update_weights.change()

    def _set_rate(self, step: RankBatch) -> None:
        factor = schedule_factor(self._config.lr, step.plan.seen, self._total_samples)
        if factor == self._rate_now:
            return
        self._rate_now = factor
        for group, peak in zip(self._optimizer.param_groups, self._peak_rates, strict=True):
            rate = max(peak * factor, self._update_weights.least_rate)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _find_buffers(self, step: RankBatch) -> MovingBuffers:
        batch, lanes = step.lanes[0].batch, self._config.batch.lanes
        return find_moving_buffers(self._inner, batch, lanes, self._world)

    def _not_finite(
        self, value: float, step: int, lane: int, when: str = "before the update"
    ) -> TrainingError:
        return TrainingError(
            f"the loss is {value} at step {step + 1}, lane {lane} (rank {self._world.rank}); training stopped {when}",
            fix="try lr.base 10 x lower, lr.warmup_samples or clip_norm; check this lane's inputs for inf or nan, "
            "and the loss for log or division of 0",
        )

    def _nothing_counted(self, step: RankBatch) -> TrainingError:
        return TrainingError(
            f"the loss returned a total count of 0 in step {step.plan.index + 1}: every token of every lane is masked",
            fix="check the mask of the loss and the samples that it masks",
        )


def clip(parameters: list[nn.Parameter], largest: float) -> None:
    """Scale the whole gradient down to a norm; the same bits for any memory layout of the gradients."""
    # On a GPU the order of a sum depends on the alignment of its input, and DDP's buckets are not aligned.
    gradients = gradients_of(parameters)
    if any(is_sharded(value) for value in gradients):
        clip_sharded(parameters, largest)
        return
    aligned = []
    for value in gradients:
        is_unaligned = value.is_cuda and value.data_ptr() % _ALIGNMENT_BYTES
        aligned.append(value.clone() if is_unaligned else value)
    nn.utils.clip_grads_with_norm_(parameters, largest, nn.utils.get_total_norm(aligned))


_ENGINE = torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch has no public name for it
_ALIGNMENT_BYTES = 512  # of CUDA's allocator
