"""How the lane gradients of one optimizer's parameters are added, on this rank and over all ranks.

Along the fixed tree (`exact`) the bits do not depend on the number of ranks; otherwise the order is free. A parameter
without a gradient in some lanes counts as zeros there. Without a gradient in every lane of the step it has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import numpy
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError, TrainingError
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
from paceline.train.gradients.gradient_buckets import (
    Bucket,
    checksums,
    flat_gradients,
    laid_out,
    make_buckets,
)
from paceline.train.gradients.lane_stack import LaneGradients, LaneStack, WrittenAgain, added
from paceline.train.gradients.note import Note, merge_rows
from paceline.train.gradients.protocol import LaneResults
from paceline.world.collectives import sum_across, wire_device
from paceline.world.world import World

_UNLIMITED_BYTES = 1 << 62
_CHECKED_FIRST = 4
_CHECKED_EVERY = 1000  # a check reads all gradients twice, and waits for the GPU

_WRITE_ONCE = (
    "pass use_reentrant=False to torch.utils.checkpoint.checkpoint; a backward of your own must return gradients "
    "instead of writing them to .grad"
)


def _is_checked(number: int) -> bool:
    """Return whether the update of this number compares what was sent with the gradients at the end of backward.

    >>> [number for number in range(2500) if _is_checked(number)]
    [0, 1, 2, 3, 1000, 2000]
    """
    return number < _CHECKED_FIRST or number % _CHECKED_EVERY == 0


class BucketedSum:
    """The gradient sum of weights that every rank holds whole.

    In a world of several ranks a bucket is sent as soon as the last lane's backward has computed it. The notes travel
    with the last bucket if that is small, and otherwise after it.

    When is a gradient computed? torch writes the gradient of a parameter once per backward, however often the
    parameter was used. But a backward that runs inside of another writes it again: `torch.utils.checkpoint` with
    use_reentrant=True does so once per checkpoint. So each lane counts how often a gradient was written. The first
    update sends nothing early. A bucket that has a parameter with several writes is never sent early. If a gradient is
    written after it was sent, the update fails. Ranks may differ in when they send, never in the order.
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
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        self._world, self._clock = world, clock
        self._exact, self._compression = exact, compression
        self._names = names or {}
        self._updates = 0
        mine = share(lanes, world.rank, world.size)
        self._merges = merges_after(mine, lanes) if exact else [0] + [1] * (len(mine) - 1)
        self._stack = LaneStack(parameters, self._merges, exact=exact)
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
            # Hooks cost some microseconds per layer: the first update tells which gradients are written again.
            for number, parameter in enumerate(parameters):
                hook = partial(self._count_write, number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
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
                hook = partial(self._on_gradient, bucket, number)
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
            bucket.waiting, bucket.is_sent, bucket.sent = len(bucket.numbers), False, None

    def before_lane(self, note: Note, *, last: bool) -> None:
        """Take a lane's note; the backward of the last lane sends gradients."""
        if any(self._stack.writes):
            raise ConfigError(
                "the loss function called backward(): its gradients would be lost",
                fix="return the sum of all losses; Paceline calls backward. For a derivative within the loss, call torch.autograd.grad",
            )
        self._stack.before_lane(note)
        self._overlaps = last and self._stack.is_complete and self._updates > 0

    def after_lane(self) -> None:
        """Take the gradients of a lane that is not this rank's last."""
        self._stack.push(self._gradients_of_lane())

    def _gradients_of_lane(self) -> LaneGradients:
        try:
            return self._stack.after_lane()
        except WrittenAgain as error:
            raise TrainingError(
                f"the gradient of {self._name(error.number)} was written several times in the backward of one lane; earlier lanes wrote it once",
                fix=_WRITE_ONCE,
            ) from None

    def finish(self) -> Note:
        """Take the last lane; leave the sum over all ranks in `grad`, and return that of the notes."""
        self._overlaps = False
        stack = self._stack
        now = self._gradients_of_lane()
        if self._world.size > 1:
            return self._finish_across()
        for _ in range(stack.left):
            now = added(stack.sums.pop(), now)
        for parameter, value in zip(stack.parameters, now, strict=True):
            parameter.grad = value
        if not self._updates:
            self.close()
        self._updates += 1
        self.is_complete = stack.is_complete
        return stack.notes[0]

    def lane_results(self) -> LaneResults:
        """Return the gradients of this rank's lanes, before they are sent; for a step that is captured."""
        return LaneResults(self._gradients_of_lane(), list(self._stack.sums))

    def send_results(self, lanes: LaneResults, notes: list[Note]) -> Note:
        """Add the gradients of replayed lanes over all ranks, as if the lanes had run."""
        self.begin()
        self._stack.load(lanes.newest, lanes.sums, notes)
        return self._finish_across()

    def use_totals(self) -> None:
        """Continue after a replayed exchange, in which every lane of this rank gave every parameter a gradient."""
        self._stack.clear()
        self._stack.reached = [True] * len(self._stack.parameters)

    def _on_gradient(self, bucket: Bucket, number: int, parameter: Tensor) -> None:
        """Send complete buckets during the last backward. All ranks send them in the same order."""
        self._count_write(number, parameter)
        if self._stack.writes[number] > 1:
            bucket.is_early = False
        if not self._overlaps:
            return
        if bucket.is_sent:
            raise self._changed_after_sent(number)
        bucket.waiting -= 1
        while self._next < len(self._buckets):
            ready = self._buckets[self._next]
            if ready.waiting or not ready.is_early:
                return
            self._clock.bucket_ready()
            self._send(ready)
            self._clock.enter("backward")

    def _count_write(self, number: int, parameter: Tensor) -> None:
        self._stack.writes[number] += 1

    def _check_sent(self) -> None:
        """Raise if a gradient is not what was sent: code that writes `grad` by itself calls no hook."""
        for bucket in self._buckets:
            if bucket.sent is None:
                continue
            now = checksums([self._stack.parameters[number].grad for number in bucket.numbers])
            differ = (now != bucket.sent).tolist()
            bucket.sent = None
            if any(differ):
                raise self._changed_after_sent(bucket.numbers[differ.index(True)])

    def _changed_after_sent(self, number: int) -> TrainingError:
        return TrainingError(
            f"the gradient of {self._name(number)} changed in backward after it was sent to the other ranks; "
            "in earlier steps it was written once",
            fix=_WRITE_ONCE,
        )

    def _name(self, number: int) -> str:
        parameter = self._stack.parameters[number]
        return self._names.get(parameter, f"parameter {number} of shape {list(parameter.shape)}")

    def finish_rows(self) -> Tensor:
        """Do what `finish` does without reading a number on the host, for a step that is captured."""
        if self._world.size == 1:
            self.finish()
            return self._notes_to_send()[0]
        self._overlaps = False
        self._gradients_of_lane()
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
        self._check_sent()
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        self._updates += 1
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
        bucket.is_sent = True
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
        if self._overlaps and _is_checked(self._updates) and not _is_capturing(newest):
            gradients = [stack.parameters[number].grad for number in bucket.numbers]
            bucket.sent = checksums(gradients)
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


def _is_capturing(value: Tensor) -> bool:
    """Return whether a CUDA graph records what happens to a tensor; the host cannot read it then."""
    return value.is_cuda and torch.cuda.is_current_stream_capturing()
