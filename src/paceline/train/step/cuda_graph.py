"""Capture an update once and replay it as a CUDA graph."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.reading.batches import Lane
from paceline.data.reading.nest import Nest, leaves_of, map_leaves
from paceline.errors import ConfigError, TrainingError
from paceline.train.gradients.gradient_sum import BucketedSum, LaneResults
from paceline.train.gradients.note import NO_MOVES, Note
from paceline.train.step.async_loss import AsyncLosses
from paceline.train.step.lane_loss import Losses, means, not_finite
from paceline.train.step.losses import LaneSeeds
from paceline.train.step.updates import UpdateCall, Updates
from paceline.train.strategy import Strategy
from paceline.world.randomness import mix
from paceline.world.world import World

_EAGER_UPDATES = 2  # the first creates the optimizer's state, the second may compile its update
_MAX_REASON_LETTERS = 400
_MAX_FUNCTIONS = 16
"""Losses of the same code, such as a lambda in the loop, after which capturing is given up."""
_Key = tuple[Any, ...]
"""What an update must share with a captured one: optimizer, loss function, clipping, and the shape of its batch."""


class _Captured(NamedTuple):
    """A captured update, with the memory that it reads and writes."""

    lanes: torch.cuda.CUDAGraph
    """Forward and backward of all lanes of this rank; in a world of one, also the change of the weights."""
    change: torch.cuda.CUDAGraph | None
    inputs: list[Nest]
    generators: list[torch.Generator]
    losses: Tensor
    results: LaneResults | None = None
    """Gradients to be added across ranks after a replay."""


class CapturedUpdates(Updates):
    """Updates with the bits of `Updates`. The third update of each kind is captured."""

    def _set_up(self) -> None:
        self._eager: Counter[_Key] = Counter()
        self._captured: dict[_Key, _Captured] = {}
        self._functions: Counter[Any] = Counter()
        self._pool = torch.cuda.graph_pool_handle()
        self._async_losses = AsyncLosses(self._config.batch.lanes)
        self._gave_up = False

    def update(self, call: UpdateCall) -> tuple[Losses, Note]:
        """Run an update: replayed if one like it was captured."""
        updates = self.of(call.optimizer)
        updates.follow_freezing()
        key = (*_key_of(call), updates.selections)
        if self._gave_up or self._eager[key] < _EAGER_UPDATES:
            self._eager[key] += 1
            self._count_function(call, is_new=self._eager[key] == 1)
            return super().update(call)
        if key not in self._captured:
            captured = self._try_to_capture(call)
            if captured is None:
                return super().update(call)
            self._captured[key] = captured
        return self._replay(self._captured[key], call)

    def _count_function(self, call: UpdateCall, *, is_new: bool) -> None:
        """Give up on a loss that is another function in every step: what was captured could not be replayed."""
        code = getattr(call.loss, "__code__", None)
        if self._gave_up or not is_new or code is None:
            return
        self._functions[code] += call.loss not in {key[1] for key in list(self._eager)[:-1]}
        if self._functions[code] > _MAX_FUNCTIONS:
            self._give_up("the loss is a new function in every step; define it before the loop")

    def _try_to_capture(self, call: UpdateCall) -> _Captured | None:
        """Return the captured update; None (or an error with capture=true) if that is impossible."""
        reason = self._obstacle(call)
        if not reason:
            try:
                return self._capture(call)
            except Exception as error:  # noqa: BLE001 - CUDA and user code raise anything
                reason = " ".join(str(error).split())[:_MAX_REASON_LETTERS]
        self._give_up(reason)
        return None

    def _give_up(self, reason: str) -> None:
        if self._config.capture == "true":
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {reason}",
                fix="remove that obstacle, or set capture=auto to train without CUDA graphs",
            )
        self._gave_up = True
        self._eager.clear()
        _print_reason(self._world, reason)

    def _obstacle(self, call: UpdateCall) -> str:
        """Return why this update cannot be captured, as far as that is known in advance."""
        leaves = [leaf for lane in call.step.lanes for leaf in leaves_of(lane.batch)]
        others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        obstacles = {
            "the loss is over the whole batch, which other ranks must send first": call.over_batch,
            "the loss returns a count or several values, which the host must read in every step": not self._is_one_mean,
            "forward changes buffers (such as BatchNorm's) in more than one lane; set batch.lanes=1": self._buffers.any_known,
            "with precision=fp16 the host must check every step for overflow; use precision=bf16": self._config.precision
            == "fp16",
            "some parameters got no gradient in the last step": not self.of(
                call.optimizer
            ).sum.is_complete,
            f"the batch contains {', '.join(sorted(set(others)))}, not only tensors": others,
        }
        return next((reason for reason, is_given in obstacles.items() if is_given), "")

    def _capture(self, call: UpdateCall) -> _Captured:
        device, step = torch.device(self._world.device), call.step
        inputs = [map_leaves(Tensor.clone, lane.batch) for lane in step.lanes]
        generators = [torch.Generator(device) for _ in step.lanes]
        losses = torch.zeros(len(step.lanes), device=device)
        captured = _Captured(torch.cuda.CUDAGraph(), None, inputs, generators, losses)
        for generator in generators:
            captured.lanes.register_generator_state(generator)
        updates = self.of(call.optimizer)
        default_generator = torch.cuda.default_generators[device.index or 0]
        generator_state = default_generator.graphsafe_get_state()
        self._warm_up(call, captured)
        assert isinstance(updates.sum, BucketedSum)
        try:
            with self._capturing(captured.lanes):
                self._compute(call, captured, default_generator)
                if self._world.size == 1:
                    updates.sum.finish()
                    updates.apply(call.clip_norm)
        finally:
            default_generator.graphsafe_set_state(generator_state)
        if self._world.size == 1:
            return captured
        results = updates.sum.lane_results()
        updates.sum.place_totals()
        change = torch.cuda.CUDAGraph()
        with self._capturing(change):
            updates.apply(call.clip_norm)
        return captured._replace(change=change, results=results)

    def _warm_up(self, call: UpdateCall, captured: _Captured) -> None:
        """Run the lanes once on the captured memory: compilation and set-up must not be part of the graph."""
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        before = [buffer.clone() for buffer in buffers]
        self._compute(call, captured, None)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Any:
        torch.cuda.synchronize()
        return torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")

    def _compute(
        self, call: UpdateCall, captured: _Captured, default_generator: torch.Generator | None
    ) -> None:
        """Run all lanes of this rank as an eager update does, on the captured memory."""
        updates, step = self.of(call.optimizer), call.step
        updates.sum.begin()
        for model in self._models:
            updates.precision.begin(model)
        for number, lane in enumerate(step.lanes):
            if default_generator is not None:
                default_generator.graphsafe_set_state(captured.generators[number])
            with updates.precision.context():
                loss = call.loss(captured.inputs[number])
            if isinstance(loss, dict):
                loss = loss["loss"]
            captured.losses[number].copy_(loss.detach())
            updates.sum.before_lane(Note(0.0, 0.0), last=False)
            updates.run_backward(loss, updates.gradient_of(loss, lane.samples / step.plan.samples))
            if lane is not step.lanes[-1]:
                updates.sum.after_lane()
        for model in self._models:
            updates.precision.finish(model)

    def _replay(self, captured: _Captured, call: UpdateCall) -> tuple[Losses, Note]:
        step = call.step
        seeds = LaneSeeds(self._config.seed, call.number)
        memory = zip(step.lanes, captured.inputs, captured.generators, strict=True)
        for lane, inputs, generator in memory:
            torch._foreach_copy_(list(leaves_of(inputs)), list(leaves_of(lane.batch)))
            generator.manual_seed(mix(*seeds.of(step.plan.index, lane.number)))
        captured.lanes.replay()
        self.ready = time.perf_counter()
        requests = Note(0.0, 0.0).with_requests(self._get_requests())
        if captured.change is None or captured.results is None:
            note = self._async_note(captured, call)
            losses = Losses({"loss": note.loss}, note.counted)
            return losses, note._replace(save=requests.save, stop=requests.stop)
        values = captured.losses.tolist()
        notes = [self._note_of(call, *pair) for pair in zip(step.lanes, values, strict=True)]
        notes[-1] = notes[-1]._replace(save=requests.save, stop=requests.stop)
        adding = self.of(call.optimizer).sum
        assert isinstance(adding, BucketedSum)
        total = adding.send_results(captured.results, notes)
        captured.change.replay()
        return means(("loss",), [float(total.loss)], [total.counted]), total

    def _async_note(self, captured: _Captured, call: UpdateCall) -> Note:
        counts = [float(lane.samples) for lane in call.step.lanes]
        late = partial(self._late_not_finite, call.step.plan.index)
        return Note(self._async_losses.copy(captured.losses, counts, late), sum(counts))

    def _note_of(self, call: UpdateCall, lane: Lane, value: float) -> Note:
        if not math.isfinite(value):
            where = f"lane {lane.number} (rank {self._world.rank})"
            raise not_finite(value, call.step.plan.index, where)
        total, count = (value * lane.samples, float(lane.samples)) if lane.samples else (0.0, 0.0)
        # As long as the notes of ranks whose step is not captured; no buffer changes here.
        return Note(total, count, numpy.zeros(1) if self._buffers.any else NO_MOVES)

    def _late_not_finite(self, step: int, value: float, lane: int) -> TrainingError:
        when = "some steps later, because the step was replayed as a CUDA graph"
        return not_finite(value, step, f"lane {lane} (rank {self._world.rank})", when)


def _key_of(call: UpdateCall) -> _Key:
    lanes = []
    for lane in call.step.lanes:
        shapes = [leaf.shape for leaf in leaves_of(lane.batch) if isinstance(leaf, Tensor)]
        lanes.append((lane.samples, tuple(shapes)))
    # The function itself, not its id, which another one may get later.
    return call.optimizer, call.loss, call.clip_norm, call.step.plan.samples, tuple(lanes)


def _not_capturable(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return why optimizers cannot be captured; empty if they can."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" not in group and not group.get("fused"):
                name = type(optimizer).__name__
                return f"{name} has no option capturable; use AdamW, or SGD with fused=True"
    return ""


def may_capture(
    world: World,
    config: RunConfig,
    strategy: Strategy,
    optimizers: Sequence[torch.optim.Optimizer],
) -> bool:
    """Return whether to try to capture updates; raise if capture=true is impossible, say why capture=auto is."""
    if config.capture == "true" and world.device == "cpu":
        raise ConfigError(
            "capture=true needs a GPU, but this run trains on cpu", fix="set capture=auto"
        )
    if not strategy.captures:
        return False
    reason = strategy.capture_obstacle or _not_capturable(optimizers)
    if reason and config.capture == "true":
        raise ConfigError(
            f"the step cannot be captured as a CUDA graph: {reason}",
            fix="use another optimizer, or set capture=auto",
        )
    if reason:
        _print_reason(world, reason)
    return not reason


def _print_reason(world: World, reason: str) -> None:
    if world.is_main:
        print(f"training without CUDA graphs: {reason}", file=sys.stderr, flush=True)
