"""An update recorded as two CUDA graphs: the lanes with the exchange of gradients, and the change of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.train.gradients.gradient_sum import BucketedSum
from paceline.train.gradients.lane_stack import LaneGradients
from paceline.train.gradients.note import Note
from paceline.train.step.captured_buffers import CapturedBuffers
from paceline.train.step.captured_inputs import CapturedInputs
from paceline.train.step.captured_notes import CapturedNotes, NoteLayout
from paceline.train.step.captured_outcome import CannotCapture, restored
from paceline.train.step.lane_loss import named_values
from paceline.train.step.losses import LaneSeeds, divide
from paceline.train.step.moving_buffers import MovingBuffers
from paceline.train.step.optimizer_updates import OptimizerUpdates
from paceline.train.step.updates import UpdateCall
from paceline.world.randomness import seed_everything
from paceline.world.world import World

_SMALL_BYTES = 64 << 20
"""Bytes of all gradients of a model whose update is also recorded as one graph, which needs their memory twice."""


class CaptureParts(NamedTuple):
    """What all captured updates of a run share."""

    world: World
    config: RunConfig
    models: Sequence[nn.Module]
    buffers: MovingBuffers
    pool: Any


class _Whole(NamedTuple):
    """A whole update of a single rank in one graph."""

    graph: torch.cuda.CUDAGraph
    head: Tensor
    gradients: LaneGradients


class RecordedUpdate:
    """The graphs of an update, with the memory that they read and write."""

    def __init__(self, parts: CaptureParts, updates: OptimizerUpdates, call: UpdateCall) -> None:
        self._parts, self._updates = parts, updates
        self._world, self._lane_count = parts.world, parts.config.batch.lanes
        self._device = torch.device(parts.world.device)
        assert isinstance(updates.sum, BucketedSum)
        self._sum = updates.sum
        self._inputs = CapturedInputs(call.step, self._device)
        self._exchanges = self._world.size > 1 and self._sum.can_capture_exchange
        self._notes: CapturedNotes
        self._is_laid_out = False
        self._warm_up(call)
        self._record_lanes(call)
        self._record_change(call)
        self._whole = self._record_whole(call)

    def _warm_up(self, call: UpdateCall) -> None:
        """Run the lanes once: compilation and set-up must not be part of the graph, and notes get their layout."""
        self._parts.buffers.begin()
        with restored(self._parts.models):
            self._compute(call, record=False)
            self._buffers.refuse_unknown()
        self._parts.buffers.begin()

    def _lay_out(self, result: Any, lanes: int) -> None:
        """Make the memory for notes, once it is known what the loss returns."""
        layout = NoteLayout.of(named_values(result)[1])
        moving = self._parts.buffers
        self._buffers = CapturedBuffers(
            moving, self._parts.models, self._lane_count, layout.flag + 1
        )
        is_plain = not moving.any and len(layout.names) == 1
        length = layout.flag if is_plain else self._buffers.end
        self._notes = CapturedNotes(layout, lanes, length, self._device)
        self._needs_total = self._world.size > 1 or layout.by_count or self._buffers.any
        self._is_laid_out = True

    def _record_lanes(self, call: UpdateCall) -> None:
        self._lanes = torch.cuda.CUDAGraph()
        with self._inputs.drawn_by(self._lanes), self._capturing(self._lanes):
            notes = self._compute(call, record=True)
            self._results = self._sum.lane_results()
            self._head = notes.head()
            if self._world.size == 1 or self._exchanges:
                self._total = self._sum.finish_rows()
        if not self._sum.lanes_are_complete:
            raise CannotCapture("some parameters got no gradient in this step")
        if self._world.size > 1 and not self._exchanges:
            self._total = torch.zeros_like(notes.rows[0])
            self._sum.place_totals()
        self._gradients = [value.grad for value in self._updates.parameters]

    def _record_change(self, call: UpdateCall) -> None:
        self._change = torch.cuda.CUDAGraph()
        moved_by = float(min(call.step.plan.samples, self._lane_count))
        # Kept: a graph reads memory, not tensors.
        self._moved_by = torch.tensor(moved_by, dtype=torch.float64, device=self._device)
        with self._capturing(self._change):
            self._apply(call, self._total, self._gradients)

    def _record_whole(self, call: UpdateCall) -> _Whole | None:
        """Record both parts as one graph if the model is small: a second launch would cost some percent of its step."""
        size = sum(value.nbytes for value in self._gradients if value is not None)
        if self._world.size > 1 or size > _SMALL_BYTES:
            return None
        graph = torch.cuda.CUDAGraph()
        with self._inputs.drawn_by(graph), self._capturing(graph):
            head = self._compute(call, record=True).head()
            total = self._sum.finish_rows()
            gradients = [value.grad for value in self._updates.parameters]
            self._apply(call, total, gradients)
        return _Whole(graph, head, gradients)

    def _apply(self, call: UpdateCall, total: Tensor, gradients: LaneGradients) -> None:
        """Change buffers and weights by the sums over all ranks."""
        self._buffers.apply(total, self._moved_by)
        if self._notes.layout.by_count:
            divide([value for value in gradients if value is not None], total[1])
        self._updates.apply(call.clip_norm)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Any:
        torch.cuda.synchronize()
        return torch.cuda.graph(graph, pool=self._parts.pool, capture_error_mode="thread_local")

    def _compute(self, call: UpdateCall, *, record: bool) -> CapturedNotes:
        """Run all lanes of this rank as an eager update does, on the captured memory."""
        updates, step = self._updates, call.step
        self._sum.begin(self._notes.rows if record and self._needs_total else None)
        for model in self._parts.models:
            updates.precision.begin(model)
        if self._is_laid_out:
            self._buffers.begin()
        for row, lane in enumerate(step.lanes):
            if record:
                self._inputs.use_generator(row)
            else:
                seed_everything(*self._seeds(call).of(step.plan.index, lane.number))
            with updates.precision.context():
                result = call.loss(self._inputs.batches[row])
            if not self._is_laid_out:
                self._lay_out(result, len(step.lanes))
            notes = self._notes
            output = notes.take(result, row, lane)
            self._buffers.take(notes.rows[row], counts=lane.samples > 0)
            is_last = lane is step.lanes[-1]
            self._sum.before_lane(Note(0.0, 0.0), last=record and is_last and self._exchanges)
            by_samples = lane.samples / step.plan.samples
            weight = float(lane.samples > 0) if notes.layout.by_count else by_samples
            updates.run_backward(output, updates.gradient_of(output, weight))
            self._buffers.reset()
            if not is_last:
                self._sum.after_lane()
        for model in self._parts.models:
            updates.precision.finish(model)
        return self._notes

    def _seeds(self, call: UpdateCall) -> LaneSeeds:
        return LaneSeeds(self._parts.config.seed, call.number)

    def close(self) -> None:
        """Free the graphs."""
        torch.cuda.synchronize()
        for graph in (self._lanes, self._change, *(self._whole or ())[:1]):
            graph.reset()
