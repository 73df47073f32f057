"""A step that was recorded once, and is replayed as a CUDA graph: the host says one word, and the device does the rest."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import Lane, RankBatch
from paceline.data.reading.source import Batch
from paceline.errors import ConfigError, TrainingError
from paceline.train.async_loss import AsyncLosses
from paceline.train.diloco import DilocoStep
from paceline.train.lane_sum import Note, RankRequests
from paceline.train.optimizer_step import LossFunction, OptimizerStep
from paceline.train.parallel import captures
from paceline.train.reduce_after_backward import LaneGradients, ReduceAfterBackward
from paceline.world.randomness import mix
from paceline.world.world import World

_FIRST_STEPS = 2  # in the first an optimizer makes its memory, in the second a compiled one is compiled for that
_LONGEST = 400  # letters of somebody else's error
_Form = tuple[Any, ...]
"""How many samples the step has, and for each lane of this rank how many count, and the shapes of its tensors."""


class _Recording(NamedTuple):
    """A step of one form, and the memory that it reads and writes."""

    lanes: torch.cuda.CUDAGraph
    """Forward and backward of all lanes of this rank; alone in the world, the update too."""
    update: torch.cuda.CUDAGraph | None
    inputs: list[Batch]
    generators: list[torch.Generator]
    losses: Tensor
    left: LaneGradients | None = None
    """What the lanes leave for the other ranks."""


class CudaGraphStep(OptimizerStep):
    """An optimizer step with the bits of `OptimizerStep`. The first two steps of every form run as they always did; the next is recorded."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        config: RunConfig,
        total_samples: int = 0,
    ) -> None:
        super().__init__(world, model, optimizer, loss, config, total_samples)
        self._met: Counter[_Form] = Counter()
        self._recordings: dict[_Form, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._late = AsyncLosses(config.batch.lanes)
        self._refused = ""

    def __call__(self, step: RankBatch, asks: Callable[[], RankRequests] | None = None) -> Note:
        """Take a step, replayed where one of its form was recorded."""
        lanes = tuple(
            (lane.samples, tuple(tensor.shape for tensor in lane.batch)) for lane in step.lanes
        )
        form = step.plan.samples, lanes
        if self._refused or self._met[form] < _FIRST_STEPS:
            self._met[form] += 1
            return super().__call__(step, asks)
        if form not in self._recordings:
            why = self._why_not()
            try:
                recording = None if why else self._record(step)
            except Exception as error:  # noqa: BLE001 - CUDA and user code raise what they like
                why, recording = " ".join(str(error).split())[:_LONGEST], None
            if recording is None:
                self._refuse(why)
                return super().__call__(step, asks)
            self._recordings[form] = recording
        return self._replay(self._recordings[form], step, asks)

    def _why_not(self) -> str:
        """Return what makes capture impossible, as far as that is known beforehand."""
        if self._by_count:
            return "the loss counts what it sums, and the host must know that number"
        if self._buffers is not None and self._buffers.any:
            return "forward changes buffers (such as BatchNorm's) in more than one lane; set batch.lanes=1"
        if self._config.precision == "fp16":
            return "with precision=fp16 the host decides whether a step counts; bf16 needs no such decision"
        return ""

    def _refuse(self, why: str) -> None:
        if self._config.capture == "true":
            raise TrainingError(
                f"the step cannot be captured: {why}",
                fix="mend that, or set capture=auto to go on without",
            )
        self._refused = why
        _tell(self._world, why)

    def _record(self, step: RankBatch) -> _Recording:
        device = torch.device(self._world.device)
        inputs = [tuple(tensor.clone() for tensor in lane.batch) for lane in step.lanes]
        generators = [torch.Generator(device) for _ in step.lanes]
        losses = torch.zeros(len(step.lanes), device=device)
        recording = _Recording(torch.cuda.CUDAGraph(), None, inputs, generators, losses)
        for generator in generators:
            recording.lanes.register_generator_state(generator)
        own = torch.cuda.default_generators[device.index or 0]
        kept = own.graphsafe_get_state()
        self._rehearse(step, recording)
        try:
            with self._recording(recording.lanes):
                self._compute(step, recording, own)
                if self._world.size == 1:
                    self._sum.finish()
                    self._apply()
        finally:
            own.graphsafe_set_state(kept)
        if self._world.size == 1:
            return recording
        update = torch.cuda.CUDAGraph()
        assert isinstance(self._sum, ReduceAfterBackward)
        left = self._sum.left()
        with self._recording(update):
            self._apply()
        return recording._replace(update=update, left=left)

    def _rehearse(self, step: RankBatch, recording: _Recording) -> None:
        """Run the lanes once on the memory of the recording: what is compiled or set up at first is none of the graph's."""
        buffers = list(self._inner.buffers())
        before = [buffer.clone() for buffer in buffers]
        self._compute(step, recording, None)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def _recording(self, graph: torch.cuda.CUDAGraph) -> Any:
        torch.cuda.synchronize()
        return torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")

    def _compute(self, step: RankBatch, recording: _Recording, own: torch.Generator | None) -> None:
        """Run all lanes of this rank as a step does, on the memory of the recording."""
        self._sum.begin()
        self.precision.begin(self._inner)
        for number, lane in enumerate(step.lanes):
            if own is not None:
                own.graphsafe_set_state(recording.generators[number])
            *inputs, target = recording.inputs[number]
            with self.precision.context():
                found = self._loss(self._inner(*inputs), target)
            assert isinstance(found, Tensor)
            recording.losses[number].copy_(found.detach())
            self._sum.before_lane(Note(0.0, 0.0))
            torch.autograd.backward(found, self._seed_for(step, lane))
            if lane is not step.lanes[-1]:
                self._sum.after_lane()
        self.precision.finish(self._inner)

    def _replay(
        self, recording: _Recording, step: RankBatch, asks: Callable[[], RankRequests] | None
    ) -> Note:
        for lane, inputs, generator in zip(
            step.lanes, recording.inputs, recording.generators, strict=True
        ):
            torch._foreach_copy_(inputs, lane.batch)
            generator.manual_seed(mix(self._config.seed, step.plan.index, lane.number))
        self._set_rate(step)
        recording.lanes.replay()
        self.ready = time.perf_counter()
        asked = Note(0.0, 0.0) if asks is None else Note(0.0, 0.0).asking(asks())
        if recording.update is None or recording.left is None:
            return self._later_note(recording, step)._replace(save=asked.save, stop=asked.stop)
        assert isinstance(self._sum, ReduceAfterBackward)
        notes = [
            self._note_of(step, *pair)
            for pair in zip(step.lanes, recording.losses.tolist(), strict=True)
        ]
        notes[-1] = notes[-1]._replace(save=asked.save, stop=asked.stop)
        self._sum.bring_back(recording.left, notes)
        total = self._sum.finish()
        recording.update.replay()
        return total

    def _later_note(self, recording: _Recording, step: RankBatch) -> Note:
        counts = [float(lane.samples) for lane in step.lanes]
        not_finite = partial(self._found_not_finite, step.plan.index)
        return Note(self._late.copy(recording.losses, counts, not_finite), sum(counts))

    def _note_of(self, step: RankBatch, lane: Lane, value: float) -> Note:
        if not math.isfinite(value):
            raise self._not_finite(value, step.plan.index, lane.number)
        return Note(value * lane.samples, float(lane.samples)) if lane.samples else Note(0.0, 0.0)

    def _found_not_finite(self, step: int, value: float, lane: int) -> TrainingError:
        return self._not_finite(value, step, lane, "some steps later, as the step was captured")


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer cannot be captured; empty: it can."""
    if all("capturable" in group or group.get("fused") for group in optimizer.param_groups):
        return ""
    return (
        f"{type(optimizer).__name__} has no option capturable; AdamW has, and SGD can be fused=True"
    )


def _tell(world: World, why: str) -> None:
    if world.is_main:
        print(f"steps are not captured: {why}", file=sys.stderr, flush=True)


def make_step(
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: LossFunction,
    config: RunConfig,
    total_samples: int = 0,
) -> OptimizerStep:
    """Return the step that the config asks for."""
    if config.capture == "true" and world.device == "cpu":
        raise ConfigError(
            "capture=true, but there is no GPU to capture a step on", fix="set capture=auto"
        )
    captured = captures(world, config)
    if captured and (why := _why_not(optimizer)):
        if config.capture == "true":
            raise ConfigError(
                f"the step cannot be captured: {why}",
                fix="take another optimizer, or set capture=auto",
            )
        _tell(world, why)
        captured = False
    if (
        config.capture == "auto"
        and world.device != "cpu"
        and (config.local_sgd.steps or config.parallel == "fsdp")
    ):
        apart = "with local_sgd.steps several copies of the weights take turns"
        _tell(
            world,
            apart
            if config.local_sgd.steps
            else "with parallel=fsdp weights are gathered on the way",
        )
    kind = DilocoStep if config.local_sgd.steps else CudaGraphStep if captured else OptimizerStep
    return kind(world, model, optimizer, loss, config, total_samples)
