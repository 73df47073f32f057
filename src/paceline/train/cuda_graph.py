"""Capture a step once and replay it as a CUDA graph."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.reading.batches import Lane, RankBatch
from paceline.data.reading.source import Batch
from paceline.errors import ConfigError, TrainingError
from paceline.train.async_loss import AsyncLosses
from paceline.train.diloco import DilocoStep
from paceline.train.note import Note
from paceline.train.optimizer_step import GetRequests, OptimizerStep
from paceline.train.parallel import captures
from paceline.train.reduce_after_backward import LaneGradients, ReduceAfterBackward
from paceline.world.randomness import mix
from paceline.world.world import World

_EAGER_STEPS = 2  # the first creates the optimizer's state, the second may compile its update
_MAX_REASON_LETTERS = 400
_BatchShape = tuple[Any, ...]
"""The step's number of samples and, for each lane of this rank, the samples and the shapes of its tensors."""


class _CapturedStep(NamedTuple):
    """A captured step for one batch shape, with the memory that it reads and writes."""

    lanes: torch.cuda.CUDAGraph
    """Forward and backward of all lanes of this rank; in a world of one, also the update."""
    update: torch.cuda.CUDAGraph | None
    inputs: list[Batch]
    generators: list[torch.Generator]
    losses: Tensor
    lane_gradients: LaneGradients | None = None
    """Gradients to be reduced across ranks after a replay."""


class CudaGraphStep(OptimizerStep):
    """An optimizer step with the bits of `OptimizerStep`. The third step of each batch shape is captured."""

    def _set_up(self) -> None:
        self._eager_steps: Counter[_BatchShape] = Counter()
        self._captured: dict[_BatchShape, _CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._async_losses = AsyncLosses(self._config.batch.lanes)
        self._gave_up = False

    def __call__(self, step: RankBatch, get_requests: GetRequests | None = None) -> Note:
        """Run a step: replayed if its batch shape was captured."""
        shape = _batch_shape(step)
        if self._gave_up or self._eager_steps[shape] < _EAGER_STEPS:
            self._eager_steps[shape] += 1
            return super().__call__(step, get_requests)
        if shape not in self._captured:
            captured = self._try_to_capture(step)
            if captured is None:
                return super().__call__(step, get_requests)
            self._captured[shape] = captured
        return self._replay(self._captured[shape], step, get_requests)

    def _try_to_capture(self, step: RankBatch) -> _CapturedStep | None:
        """Return the captured step; None (or an error with capture=true) if that is impossible."""
        reason = self._obstacle()
        if not reason:
            try:
                return self._capture(step)
            except Exception as error:  # noqa: BLE001 - CUDA and user code raise anything
                reason = " ".join(str(error).split())[:_MAX_REASON_LETTERS]
        if self._config.capture == "true":
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {reason}",
                fix="remove that obstacle, or set capture=auto to train without CUDA graphs",
            )
        self._gave_up = True
        _print_reason(self._world, reason)
        return None

    def _obstacle(self) -> str:
        """Return why this step cannot be captured, as far as that is known in advance."""
        if self._by_count:
            return "the loss returns a count, which the host must read in every step"
        if self._buffers is not None and self._buffers.any:
            return "forward changes buffers (such as BatchNorm's) in more than one lane; set batch.lanes=1"
        if self._config.precision == "fp16":
            return "with precision=fp16 the host must check every step for overflow; use precision=bf16"
        return ""

    def _capture(self, step: RankBatch) -> _CapturedStep:
        device = torch.device(self._world.device)
        inputs = [tuple(tensor.clone() for tensor in lane.batch) for lane in step.lanes]
        generators = [torch.Generator(device) for _ in step.lanes]
        losses = torch.zeros(len(step.lanes), device=device)
        captured = _CapturedStep(torch.cuda.CUDAGraph(), None, inputs, generators, losses)
        for generator in generators:
            captured.lanes.register_generator_state(generator)
        default_generator = torch.cuda.default_generators[device.index or 0]
        generator_state = default_generator.graphsafe_get_state()
        self._warm_up(step, captured)
        try:
            with self._capturing(captured.lanes):
                self._compute(step, captured, default_generator)
                if self._world.size == 1:
                    self._sum.finish()
                    self._apply()
        finally:
            default_generator.graphsafe_set_state(generator_state)
        if self._world.size == 1:
            return captured
        update = torch.cuda.CUDAGraph()
        assert isinstance(self._sum, ReduceAfterBackward)
        lane_gradients = self._sum.lane_gradients()
        with self._capturing(update):
            self._apply()
        return captured._replace(update=update, lane_gradients=lane_gradients)

    def _warm_up(self, step: RankBatch, captured: _CapturedStep) -> None:
        """Run the lanes once on the captured memory: compilation and set-up must not be part of the graph."""
        buffers = list(self._inner.buffers())
        before = [buffer.clone() for buffer in buffers]
        self._compute(step, captured, None)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Any:
        torch.cuda.synchronize()
        return torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")

    def _compute(
        self, step: RankBatch, captured: _CapturedStep, default_generator: torch.Generator | None
    ) -> None:
        """Run all lanes of this rank as an eager step does, on the captured memory."""
        self._sum.begin()
        self.precision.begin(self._inner)
        for number, lane in enumerate(step.lanes):
            if default_generator is not None:
                default_generator.graphsafe_set_state(captured.generators[number])
            *inputs, target = captured.inputs[number]
            with self.precision.context():
                loss = self._loss(self._inner(*inputs), target)
            assert isinstance(loss, Tensor)
            captured.losses[number].copy_(loss.detach())
            self._sum.before_lane(Note(0.0, 0.0))
            torch.autograd.backward(loss, self._seed_for(step, lane))
            if lane is not step.lanes[-1]:
                self._sum.after_lane()
        self.precision.finish(self._inner)

    def _replay(
        self, captured: _CapturedStep, step: RankBatch, get_requests: GetRequests | None
    ) -> Note:
        memory = zip(step.lanes, captured.inputs, captured.generators, strict=True)
        for lane, inputs, generator in memory:
            torch._foreach_copy_(inputs, lane.batch)
            generator.manual_seed(mix(self._config.seed, step.plan.index, lane.number))
        self._set_rate(step)
        captured.lanes.replay()
        self.ready = time.perf_counter()
        requests = Note(0.0, 0.0)
        if get_requests is not None:
            requests = requests.with_requests(get_requests())
        if captured.update is None or captured.lane_gradients is None:
            note = self._async_note(captured, step)
            return note._replace(save=requests.save, stop=requests.stop)
        assert isinstance(self._sum, ReduceAfterBackward)
        losses = captured.losses.tolist()
        notes = [self._note_of(step, *pair) for pair in zip(step.lanes, losses, strict=True)]
        notes[-1] = notes[-1]._replace(save=requests.save, stop=requests.stop)
        self._sum.load_lanes(captured.lane_gradients, notes)
        total = self._sum.finish()
        captured.update.replay()
        return total

    def _async_note(self, captured: _CapturedStep, step: RankBatch) -> Note:
        counts = [float(lane.samples) for lane in step.lanes]
        not_finite = partial(self._late_not_finite, step.plan.index)
        return Note(self._async_losses.copy(captured.losses, counts, not_finite), sum(counts))

    def _note_of(self, step: RankBatch, lane: Lane, value: float) -> Note:
        if not math.isfinite(value):
            raise self._not_finite(value, step.plan.index, lane.number)
        return Note(value * lane.samples, float(lane.samples)) if lane.samples else Note(0.0, 0.0)

    def _late_not_finite(self, step: int, value: float, lane: int) -> TrainingError:
        when = "some steps later, because the step was replayed as a CUDA graph"
        return self._not_finite(value, step, lane, when)


def _batch_shape(step: RankBatch) -> _BatchShape:
    return step.plan.samples, tuple(_lane_shape(lane) for lane in step.lanes)


def _lane_shape(lane: Lane) -> _BatchShape:
    return lane.samples, tuple(tensor.shape for tensor in lane.batch)


def step_class(
    world: World, optimizer: torch.optim.Optimizer, config: RunConfig
) -> type[OptimizerStep]:
    """Return the kind of step for these settings, to be called like `OptimizerStep`."""
    if config.capture == "true" and world.device == "cpu":
        raise ConfigError(
            "capture=true needs a GPU, but this run trains on cpu", fix="set capture=auto"
        )
    if config.local_sgd.steps or config.parallel == "fsdp":
        if config.capture == "auto" and world.device != "cpu":
            _print_reason(world, _unsupported(config))
        return DilocoStep if config.local_sgd.steps else OptimizerStep
    if not captures(world, config):
        return OptimizerStep
    reason = _optimizer_obstacle(optimizer)
    if not reason:
        return CudaGraphStep
    if config.capture == "true":
        raise ConfigError(
            f"the step cannot be captured as a CUDA graph: {reason}",
            fix="use another optimizer, or set capture=auto",
        )
    _print_reason(world, reason)
    return OptimizerStep


def _unsupported(config: RunConfig) -> str:
    if config.local_sgd.steps:
        return "local SGD swaps the weights of several replicas"
    return "parallel=fsdp gathers weights during forward and backward"


def _optimizer_obstacle(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer cannot be captured; empty if it can."""
    if all("capturable" in group or group.get("fused") for group in optimizer.param_groups):
        return ""
    return f"{type(optimizer).__name__} has no option capturable; use AdamW, or SGD with fused=True"


def _print_reason(world: World, reason: str) -> None:
    if world.is_main:
        print(f"training without CUDA graphs: {reason}", file=sys.stderr, flush=True)
