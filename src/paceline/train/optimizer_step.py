"""How one optimizer step happens: lane after lane, one sum, one update."""

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
from paceline.train.lane_sum import FreeSum, Note, RankRequests, gradients_of
from paceline.train.parallel import inner, lane_sum, shards
from paceline.train.precision import Precision
from paceline.train.sharded_tensor import clip_sharded, is_sharded, mine
from paceline.train.state import NOTHING, load_state, python_numbers
from paceline.train.update import make_update
from paceline.world.randomness import seed_everything
from paceline.world.world import World

LossFunction = Callable[..., Tensor | tuple[Tensor, Tensor | int]]
"""loss(outputs, target) -> the mean over the samples; or (sum, count), for tokens of ragged lengths."""


class OptimizerStep:
    """One call is one optimizer step, the same bits on any number of ranks."""

    met = False
    """Whether ranks that walk apart met after the last step."""
    _walks_apart = False

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        config: RunConfig,
        total_samples: int = 0,
    ) -> None:
        if bool(config.local_sgd.steps) is not self._walks_apart:
            raise ConfigError(
                f"local_sgd.steps={config.local_sgd.steps} is not for {type(self).__name__}",
                fix="let `paceline.Trainer` take the steps, or set local_sgd.steps=0",
            )
        self._world, self._model, self._inner = world, model, inner(model)
        self._optimizer, self._config = optimizer, config
        self._loss: LossFunction = torch.compile(loss, dynamic=False) if config.compile else loss
        self._total_samples = total_samples
        self._sum = lane_sum(model, world, config)
        self._trainable = [
            parameter for parameter in self._inner.parameters() if parameter.requires_grad
        ]
        self._peak_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._update_weights = make_update(optimizer, config, world.device)
        self._rate_now = math.nan  # so that the first step sets all rates
        self.precision = Precision(config, world.device, world.size)
        self._by_count = False
        self._buffers: MovingBuffers | None = None
        self._seeds: dict[float, Tensor] = {}
        self.clock = PhaseClock()
        """What this rank spends its time on."""
        if isinstance(self._sum, TreeReduction):
            self._sum.clock = self.clock
        # Where weights are gathered as they are needed, forward and backward are as long as those of the slowest rank.
        self._mixed = shards(world, config)
        self.ready = 0.0
        """When, by `time.perf_counter`, this rank had done its own part of the last step: from there on it also waits for others."""

    def __call__(self, step: RankBatch, asks: Callable[[], RankRequests] | None = None) -> Note:
        """Compute this rank's lanes, sum them with those of all others, and update the weights.

        The note holds the sums over what this rank knows; `total` makes them sums over all ranks. `asks` is called as
        late as it can be; the note counts the ranks that ask.
        """
        first_time = self._buffers is None
        self.clock.begin_step()
        self._enter("forward")
        self.precision.begin(self._inner)
        buffers = self._buffers = self._buffers or self._find_buffers(step)
        self._sum.begin()
        buffers.begin()
        for _ in range(self._sum.idle):
            self._idle(step, buffers)
        for lane in step.lanes[:-1]:
            output, note = self._forward(self._inner, step, lane)
            self._sum.before_lane(note)
            self._enter("backward")
            torch.autograd.backward(output, self._seed_for(step, lane))
            self._sum.after_lane()
            buffers.restore()
            self._enter("forward")
        output, note = self._forward(self._model, step, step.lanes[-1])
        self._sum.before_lane(note if asks is None else note.asking(asks()))
        self.ready = time.perf_counter()
        self._last_backward(output, self._seed_for(step, step.lanes[-1]))
        totals = self._sum.finish()
        self.clock.enter("optimizer")
        self.precision.finish(self._inner)
        if (
            first_time
        ):  # a missing gradient would hold DDP up, but not a world of one: it is an error in both
            gradients_of(self._trainable)
        self._update(step, totals)
        self.clock.enter("other")
        return totals

    def _enter(self, phase: str) -> None:
        self.clock.enter(WAIT if self._mixed else phase)

    def _last_backward(self, output: Tensor, seed: Tensor) -> None:
        """Run the backward that sums across ranks as it goes; what it waits for others is not its own time."""
        self._enter("backward")
        if isinstance(self._sum, FreeSum) and self._world.size > 1:
            # Callbacks run in their order, so this one comes before that in which DDP waits.
            output.register_hook(lambda _: _ENGINE.queue_callback(self.clock.bucket_ready))  # type: ignore[no-untyped-call]
        torch.autograd.backward(output, seed)
        self.clock.bucket_ready()

    def _idle(self, step: RankBatch, buffers: MovingBuffers) -> None:
        """Run a lane for the sake of the ranks that have one more: they need this rank's slices of the weights."""
        output, _ = self._forward(self._model, step, step.lanes[0])
        torch.autograd.backward(output, torch.zeros_like(output))
        buffers.restore()

    def total(self, note: Note) -> Note:
        """Return the sum of a note over all ranks. Every rank must call this."""
        with self.clock.waiting():
            return self._sum.total(note)

    @property
    def knows_all(self) -> bool:
        """Whether a step's note is the sum over all ranks already."""
        return self._sum.knows_all

    def own_state(self) -> Mapping[str, Tensor]:
        """Return the state that lies on this rank alone, beside that of model and optimizer."""
        return NOTHING

    def numbers(self) -> dict[str, str]:
        """Return which entries of the optimizer's state are Python numbers."""
        return python_numbers(self._optimizer, self._model)

    def load(self, saved: Iterable[tuple[str, Tensor]], numbers: Mapping[str, str]) -> list[str]:
        """Go on from saved tensors; return what does not fit."""
        return load_state(self._model, self._optimizer, saved, numbers)

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return self._peak_rates[0] * self._rate_now

    def _forward(self, model: nn.Module, step: RankBatch, lane: Lane) -> tuple[Tensor, Note]:
        """Run one lane; return what to run backward from, and the lane's note."""
        assert self._buffers is not None
        seed_everything(self._config.seed, step.plan.index, lane.number)
        *inputs, target = lane.batch
        with self.precision.context():
            found = self._loss(model(*inputs), target)
        self._by_count = isinstance(found, tuple)
        output, count = (
            (found[0], float(found[1]))
            if isinstance(found, tuple)
            else (found, float(lane.samples))
        )
        value = output.item()
        if not math.isfinite(value):
            raise self._not_finite(value, step.plan.index, lane.number)
        counts = lane.samples > 0
        moves = self._buffers.move_of_lane(counts=counts)
        return output, Note(
            value if self._by_count else value * count, count, moves
        ) if counts else Note(0.0, 0.0, moves)

    def _seed_for(self, step: RankBatch, lane: Lane) -> Tensor:
        """Return the gradient that backward starts with: the weight of this lane in the mean over the step's samples.

        Where the loss gives a count, only the sum of all lanes tells the weight: gradients are divided at the end.
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
            torch._foreach_div_(
                [mine(value) for value in gradients_of(self._trainable)], totals.counted
            )
        self._buffers.apply(totals.moves, min(step.plan.samples, self._config.batch.lanes))
        self._set_rate(step)
        if self.precision.unscale(gradients_of(self._trainable)):
            self._apply()

    def _apply(self) -> None:
        """Change the weights by the gradients that are there."""
        if self._config.clip_norm:
            clip(self._trainable, self._config.clip_norm)
        self._update_weights.change()

    def _set_rate(self, step: RankBatch) -> None:
        factor = schedule_factor(self._config.lr, step.plan.seen, self._total_samples)
        if factor != self._rate_now:
            self._rate_now = factor
            for group, peak in zip(self._optimizer.param_groups, self._peak_rates, strict=True):
                rate = max(peak * factor, self._update_weights.least_rate)
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _find_buffers(self, step: RankBatch) -> MovingBuffers:
        return find_moving_buffers(
            self._inner, step.lanes[0].batch, self._config.batch.lanes, self._world
        )

    def _not_finite(
        self, value: float, step: int, lane: int, when: str = "before the update"
    ) -> TrainingError:
        return TrainingError(
            f"the loss is {value} at step {step + 1}, lane {lane} (rank {self._world.rank}); training stopped {when}",
            fix="look at the learning rate (try lr.base 10 x lower or lr.warmup_samples), at clip_norm, at this lane's inputs "
            "for inf or nan, and at log or division of 0 in the loss",
        )

    def _nothing_counted(self, step: RankBatch) -> TrainingError:
        return TrainingError(
            f"the loss counted nothing in step {step.plan.index + 1}: no sample of any lane has a token that counts",
            fix="look at the mask of the loss and at the samples it masks",
        )


def clip(parameters: list[nn.Parameter], largest: float) -> None:
    """Shrink the whole gradient to a norm; the same bits wherever the gradients lie in memory."""
    # On a GPU the order in which a sum is taken depends on the alignment of its input, and DDP's buckets align nothing.
    gradients = gradients_of(parameters)
    if any(is_sharded(value) for value in gradients):
        clip_sharded(parameters, largest)
        return
    aligned = [
        value.clone() if value.is_cuda and value.data_ptr() % _ALIGNED else value
        for value in gradients
    ]
    nn.utils.clip_grads_with_norm_(parameters, largest, nn.utils.get_total_norm(aligned))


_ENGINE = torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch has no public name for it
_ALIGNED = 512  # bytes: what the allocator of CUDA gives
