"""How the lane gradients of one optimizer's parameters are added, on this rank and over all ranks.

Along the fixed tree (`exact`) the bits do not depend on the number of ranks; otherwise the order is free. A parameter
without a gradient in some lanes counts as zeros there. Without a gradient in every lane of the step it has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import numpy
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.telemetry.phases import PhaseClock
from paceline.train.gradients.bucket_exchange import (
    AllGatherExchange,
    Exchange,
    TreeShape,
    sum_of_notes,
)
from paceline.train.gradients.compression import AllReduceExchange, PowerSgdExchange
from paceline.train.gradients.exchange_choice import choose_exchange
from paceline.train.gradients.gradient_buckets import Bucket, flat_gradients, laid_out, make_buckets
from paceline.train.gradients.lane_stack import LaneStack, added
from paceline.train.gradients.note import Note, merge_rows
from paceline.train.gradients.protocol import LaneResults
from paceline.world.collectives import sum_across, wire_device
from paceline.world.world import World

_UNLIMITED_BYTES = 1 << 62


class BucketedSum:
    """The gradient sum of weights that every rank holds whole.

    In a world of several ranks a bucket is sent as soon as the last lane's backward has computed it. The notes travel
    with the last bucket if that is small, and otherwise after it.
    """

    idle = 0

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lanes: int,
        world: World,
        clock: PhaseClock,
        *,
        exact: bool,
        compression: str = "none",
    ) -> None:
        self._world, self._clock = world, clock
        self._exact, self._compression = exact, compression
        mine = share(lanes, world.rank, world.size)
        self._merges = merges_after(mine, lanes) if exact else [0] + [1] * (len(mine) - 1)
        self._stack = LaneStack(parameters, self._merges)
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._pending: list[Bucket] = []
        self._next = 0
        self._overlaps = False
        self._notes_exchange: AllGatherExchange | None = None
        # Of the last bucket, by the length of notes; all are kept: captured updates use their memory.
        self._carriers: dict[int, Exchange] = {}
        self._note_length = 0
        self._rows: Tensor | None = None
        self.is_complete = True
        """Whether every lane of every rank gave every parameter a gradient in the last update."""
        self._side_stream: torch.cuda.Stream | None = None
        if world.size == 1:
            return
        self._wire = wire_device(world)
        each = [range(rank, rank + 1) for rank in range(world.size)]
        self._shape = TreeShape.over(each, world.size, world.rank)
        if exact:
            self._shape = TreeShape.of(lanes, world)
        if self._wire.type == "cuda":
            self._side_stream = torch.cuda.Stream(self._wire)  # type: ignore[no-untyped-call]
        self._set_up_buckets(parameters)

    def _set_up_buckets(self, parameters: list[nn.Parameter]) -> None:
        # One bucket: the messages of PowerSGD would be in another order on each rank.
        limits = [_UNLIMITED_BYTES] * 2 if self._compression == "powersgd" else []
        for numbers in make_buckets(parameters, *limits):
            values: list[Tensor] = [parameters[number].detach() for number in numbers]
            total = values[0].new_empty(sum(value.numel() for value in values))
            bucket = Bucket(numbers, values, total, self._exchange_of(values, total, 0))
            self._buckets.append(bucket)
            for number in numbers:
                hook = partial(self._on_gradient, bucket)
                parameter = parameters[number]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _exchange_of(self, values: list[Tensor], total: Tensor, note_length: int) -> Exchange:
        chosen = choose_exchange(total, note_length, self._shape, self._wire)
        carries_notes = isinstance(chosen, AllGatherExchange) and chosen.carries_notes
        if self._exact or (carries_notes and self._compression == "none"):
            return chosen
        if self._compression == "powersgd":
            return PowerSgdExchange(values, self._world.size)
        return AllReduceExchange(self._wire, self._compression)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, rows: Tensor | None = None) -> None:
        """Start an update without gradients; `rows`: the notes of this rank's lanes, where they stay on the GPU."""
        self._stack.clear()
        self._next, self._rows = 0, rows
        self._pending.clear()  # a capture may have failed
        for bucket in self._buckets:
            bucket.waiting = len(bucket.numbers)

    def before_lane(self, note: Note, *, last: bool) -> None:
        """Take a lane's note; the backward of the last lane sends gradients."""
        self._stack.before_lane(note)
        self._overlaps = last and self._stack.is_complete

    def after_lane(self) -> None:
        """Take the gradients of a lane that is not this rank's last."""
        self._stack.push(self._stack.after_lane())

    def finish(self) -> Note:
        """Take the last lane; leave the sum over all ranks in `grad`, and return that of the notes."""
        self._overlaps = False
        stack = self._stack
        now = stack.after_lane()
        if self._world.size > 1:
            return self._finish_across()
        for _ in range(stack.left):
            now = added(stack.sums.pop(), now)
        for parameter, value in zip(stack.parameters, now, strict=True):
            parameter.grad = value
        self.is_complete = stack.is_complete
        return stack.notes[0]

    def lane_results(self) -> LaneResults:
        """Return the gradients of this rank's lanes, before they are sent; for a step that is captured."""
        return LaneResults(self._stack.after_lane(), list(self._stack.sums))

    def send_results(self, lanes: LaneResults, notes: list[Note]) -> Note:
        """Add the gradients of replayed lanes over all ranks, as if the lanes had run."""
        self.begin()
        self._stack.load(lanes.newest, lanes.sums, notes)
        return self._finish_across()

    def use_totals(self) -> None:
        """Continue after a replayed exchange, in which every lane of this rank gave every parameter a gradient."""
        self._stack.clear()
        self._stack.reached = [True] * len(self._stack.parameters)

    def _on_gradient(self, bucket: Bucket, parameter: Tensor) -> None:
        """Send complete buckets during the last backward. All ranks send them in the same order."""
        if not self._overlaps:
            return
        bucket.waiting -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._clock.bucket_ready()
            self._send(self._buckets[self._next])
            self._clock.enter("backward")

    def finish_rows(self) -> Tensor:
        """Do what `finish` does without reading a number on the host, for a step that is captured."""
        if self._world.size == 1:
            self.finish()
            return self._notes_to_send()[0]
        self._overlaps = False
        self._stack.after_lane()
        return self._sum_across()

    @property
    def lanes_are_complete(self) -> bool:
        """Whether every lane of this rank gave every parameter a gradient."""
        return self._stack.is_complete

    @property
    def can_capture_exchange(self) -> bool:
        """Whether the exchange can be part of a CUDA graph: it runs on the GPU alone."""
        return self._side_stream is not None and self._compression != "powersgd"

    def settle(self, total: Note) -> Note:
        """Drop the gradients that no lane has given; return the note without the number that says so."""
        incomplete, moves = total.moves[0], total.moves[1:]
        self.is_complete = not incomplete
        if incomplete:
            self._drop_unreached()
        return total._replace(moves=moves)

    def _finish_across(self) -> Note:
        return self.settle(Note.from_tensor(self._sum_across().cpu()))

    def _sum_across(self) -> Tensor:
        """Leave the sums over all ranks in `grad`; return that of the notes."""
        self._clock.bucket_ready()
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        with self._on_side_stream():
            while self._pending:
                self._advance(self._pending)
        if self._side_stream is not None:
            torch.cuda.current_stream(self._wire).wait_stream(self._side_stream)
        self.place_totals()
        if self._notes_exchange is not None:
            return self._notes_exchange.total_note()
        return sum_of_notes(self._notes_to_send(), self._shape, self._wire)

    def place_totals(self) -> None:
        """Let each parameter's `grad` be its part of the sum over all ranks."""
        for bucket in self._buckets:
            views = laid_out(bucket.total, bucket.parameters)
            for number, view in zip(bucket.numbers, views, strict=True):
                self._stack.parameters[number].grad = view

    def _send(self, bucket: Bucket) -> None:
        self._next += 1
        is_last = self._next == len(self._buckets)
        with self._on_side_stream():
            notes = self._carried_notes(bucket) if is_last else []
            bucket.exchange.start(self._subtree_sums(bucket), notes)
            # On a side stream a wait does not block the host: the exchange is finished at once.
            earlier = self._pending
            self._pending = [*earlier, bucket]
            self._advance(earlier if self._side_stream is None else self._pending)

    def _carried_notes(self, last: Bucket) -> list[Tensor]:
        """Return the notes if the last bucket carries them; otherwise send them alone after it."""
        notes = self._notes_to_send()
        if len(notes[0]) != self._note_length:
            self._note_length = len(notes[0])
            self._choose_carrier(last)
        return notes if self._notes_exchange is not None else []

    def _choose_carrier(self, last: Bucket) -> None:
        """Let the last bucket carry notes of this length, if it is small enough."""
        self._notes_exchange = None
        if self._compression != "none":
            return
        if self._note_length not in self._carriers:
            carrier = self._exchange_of(last.parameters, last.total, self._note_length)
            self._carriers[self._note_length] = carrier
        last.exchange = self._carriers[self._note_length]
        if isinstance(last.exchange, AllGatherExchange) and last.exchange.carries_notes:
            self._notes_exchange = last.exchange

    def _advance(self, buckets: list[Bucket]) -> None:
        """Advance some buckets by one stage."""
        for bucket in list(buckets):
            if bucket.exchange.advance(bucket.total):
                self._pending.remove(bucket)

    def _subtree_sums(self, bucket: Bucket) -> list[Tensor]:
        """Return the flat sums of this rank's whole subtrees, the last lane included."""
        stack = self._stack
        newest = flat_gradients(
            bucket, [stack.parameters[number].grad for number in bucket.numbers]
        )
        rows = [flat_gradients(bucket, bucket.choose(subtree)) for subtree in stack.sums]
        for _ in range(stack.left):
            newest.add_(rows.pop())
        return [*rows, newest]

    def _notes_to_send(self) -> list[Tensor]:
        """Return this rank's notes with one more number: whether this rank has missing gradients."""
        if self._rows is not None:
            return merge_rows(self._rows, self._merges)
        notes = []
        is_complete = self._overlaps or self._stack.is_complete
        for row, note in enumerate(self._stack.notes):
            incomplete = float(not row and not is_complete)
            moves = numpy.concatenate([[incomplete], note.moves])
            notes.append(note._replace(moves=moves).to_tensor())
        return notes

    def _drop_unreached(self) -> None:
        """Remove the gradients of parameters that no lane of any rank has reached. Every rank calls this."""
        reached = sum_across(self._world, torch.tensor(self._stack.reached, dtype=torch.float64))
        for parameter, ranks in zip(self._stack.parameters, reached.tolist(), strict=True):
            if not ranks:
                parameter.grad = None

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        if self._side_stream is None:
            yield
            return
        self._side_stream.wait_stream(torch.cuda.current_stream(self._wire))
        with torch.cuda.stream(self._side_stream):
            yield
