"""A captured update: how it is replayed, and compared with an eager one.

Between its two graphs the host may look: several ranks read the sum of the notes, so a loss that is not finite stops
them before the weights change, and requests to save or stop are granted in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from paceline.train.gradients.lane_stack import LaneGradients
from paceline.train.gradients.note import NOTE_HEAD, Note, RankRequests
from paceline.train.step.captured_change import ChangedState, can_repeat
from paceline.train.step.captured_notes import StepLanes
from paceline.train.step.captured_outcome import (
    CannotCapture,
    Outcome,
    flat,
    restore,
    restored,
    values_of,
)
from paceline.train.step.lane_loss import Losses, not_finite, refuse_no_count
from paceline.train.step.recorded_update import RecordedUpdate
from paceline.train.step.updates import UpdateCall


class CapturedUpdate(RecordedUpdate):
    """Replays the graphs of an update for the batches of other steps."""

    def _fill(self, call: UpdateCall, requests: RankRequests) -> None:
        """Copy batch, seeds and requests to where a replay reads them."""
        self._inputs.fill(call.step, self._seeds(call))
        self._buffers.collect()
        if self._exchanges:
            self._notes.set_requests(*requests)

    def replay(self, call: UpdateCall, requests: RankRequests) -> tuple[Losses, Note]:
        """Run the update; return mean losses and the sum of the notes."""
        self._fill(call, requests)
        if self._whole is None:
            self._lanes.replay()
            return self._finish(call, requests, self._change.replay)
        self._whole.graph.replay()
        return self._leave(call, requests, self._whole.head, self._whole.gradients)

    def _finish(
        self, call: UpdateCall, requests: RankRequests, change: Callable[[], object]
    ) -> tuple[Losses, Note]:
        """Change the weights after the lanes were replayed; return mean losses and the sum of the notes."""
        if self._world.size == 1:
            change()
            return self._leave(call, requests, self._head, self._gradients)
        total = self._sum_of_ranks(call, requests)
        change()
        self._show(self._gradients)
        others = 2 * (len(self._notes.layout.names) - 1)
        if total.moves[others : others + 1].any():
            self._parts.buffers.apply_new(min(call.step.plan.samples, self._lane_count))
        return self._notes.losses(total), total

    def _leave(
        self, call: UpdateCall, requests: RankRequests, head: Tensor, gradients: LaneGradients
    ) -> tuple[Losses, Note]:
        """End an update of a single rank, whose host does not wait for the loss."""
        self._show(gradients)
        losses = self._notes.read_later(head, self._where(call))
        loss, counted = losses._of_loss  # noqa: SLF001 - the captured step made it
        return losses, Note(loss, counted, save=float(requests.save), stop=float(requests.stop))

    def _show(self, gradients: LaneGradients) -> None:
        """Let the user's code find what a replay has written."""
        self._buffers.forget()
        for parameter, gradient in zip(self._updates.parameters, gradients, strict=True):
            if parameter.grad is not gradient:  # setting it takes longer
                parameter.grad = gradient

    def _where(self, call: UpdateCall) -> StepLanes:
        lanes, plan = tuple(lane.number for lane in call.step.lanes), call.step.plan
        return StepLanes(plan.index, plan.samples, lanes, self._world.rank)

    def _sum_of_ranks(self, call: UpdateCall, requests: RankRequests) -> Note:
        """Return the sum of the notes over all ranks, once `total` and the gradients hold those of all ranks."""
        where = self._where(call)
        if self._exchanges:
            total = Note.from_tensor(self._total.cpu())
            if not math.isfinite(float(total.loss)):
                where.refuse_not_finite(self._notes.rows.tolist(), late=False)
                raise not_finite(float(total.loss), call.step.plan.index, "on another rank")
            self._sum.use_totals()
            total = self._sum.settle(total)
        else:
            rows = self._notes.rows.tolist()
            where.refuse_not_finite(rows, late=False)
            notes = [Note(row[0], row[1], numpy.array(row[NOTE_HEAD + 1 :])) for row in rows]
            notes[-1] = notes[-1].with_requests(requests)
            total = self._sum.send_results(self._results, notes)
            numbers = total.to_tensor()
            parts = [numbers[:NOTE_HEAD], numbers.new_zeros(1), numbers[NOTE_HEAD:]]
            self._total.copy_(torch.cat(parts))
        if self._notes.layout.by_count:
            refuse_no_count(float(total.counted), call.step.plan.index)
        return total

    # Comparing

    def difference(self, call: UpdateCall, requests: RankRequests) -> str:
        """Replay the lanes, and compare them with eager ones; return how they differ, "" if they do not."""
        models = self._parts.models
        self._fill(call, requests)
        before, wanted, text = values_of(models), None, ""
        self._before = before
        try:
            with restored(models):
                self._compute(call, record=False)
                rows = self._notes.rows.clone()
                wanted = Outcome(rows, self._lane_gradients(), values_of(models))
        except CannotCapture as reason:
            text = str(reason)
        self._lanes.replay()  # in any case: other ranks wait for its collectives
        if wanted is not None:
            is_alone = self._world.size == 1
            gradients = self._gradients if is_alone else flat(self._results)
            found = Outcome(self._notes.rows, gradients, values_of(models))
            lanes = [lane.number for lane in call.step.lanes]
            text = found.difference_from(wanted, lanes, exact=self._parts.config.exact)
        if text:
            restore(models, before)
        return text

    def finish_compared(
        self, call: UpdateCall, requests: RankRequests
    ) -> tuple[tuple[Losses, Note], str]:
        """End an update after `difference`: the weights change eagerly, and by replays; return how these differ."""
        texts: list[str] = []
        found = self._finish(
            call, requests, lambda: texts.append(self._change_difference(call, requests))
        )
        return found, texts[0]

    def _change_difference(self, call: UpdateCall, requests: RankRequests) -> str:
        optimizer, models = call.optimizer, self._parts.models
        state = ChangedState(models, optimizer, self._gradients)
        if not (self._parts.config.exact and can_repeat(optimizer) and state.has_room):
            self._change.replay()
            return ""
        self._show(self._gradients)

        def eager() -> None:
            self._apply(call, self._total, self._gradients)

        def whole() -> None:
            restore(models, self._before)  # a single lane has changed them
            self._fill(call, requests)
            assert self._whole
            self._whole.graph.replay()

        replays: dict[str, Callable[[], object]] = {"the replay": self._change.replay}
        if self._whole is not None:
            replays["the replay as one graph"] = whole
        return state.difference(eager, replays)

    def _lane_gradients(self) -> LaneGradients:
        """Return the gradients of eager lanes, as far as a replay leaves them in its memory."""
        if self._world.size > 1:
            return flat(self._sum.lane_results())
        self._sum.finish()
        return [value.grad for value in self._updates.parameters]
