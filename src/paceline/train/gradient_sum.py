"""How the lane gradients of one optimizer's parameters are added, on this rank and over all ranks.

Along the fixed tree (`exact`) the bits do not depend on the number of ranks; otherwise the order is free. A parameter
without a gradient in some lanes counts as zeros there. Without a gradient in every lane of the step it has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.telemetry.phases import PhaseClock
from paceline.train.bucket_exchange import AllGatherExchange, Exchange, TreeShape, choose_exchange
from paceline.train.ddp_reduction import laid_out
from paceline.train.lane_stack import LaneGradients, LaneStack, added
from paceline.train.note import Note
from paceline.world.collectives import finish, sum_across, wire_device
from paceline.world.world import World

_FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first message starts early
_BUCKET_BYTES = 25 << 20


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients cross in one message."""

    numbers: list[int]
    parameters: list[Tensor]
    size: int
    waiting: int
    """Parameters whose gradient the last lane has not computed yet."""
    total: Tensor
    exchange: Exchange

    def choose(self, gradients: LaneGradients) -> LaneGradients:
        """Return the gradients of its parameters, of those of all parameters."""
        return [gradients[number] for number in self.numbers]


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Return the numbers of the parameters of each bucket; backward reaches the last parameters first.

    >>> make_buckets([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1 << 18)), nn.Parameter(torch.zeros(2))])
    [[2, 1], [0]]
    """
    buckets: list[list[int]] = []
    newest: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    limit = _FIRST_BUCKET_BYTES
    for number in reversed(range(len(parameters))):
        value = parameters[number]
        if value.dtype not in newest:
            newest[value.dtype], sizes[value.dtype] = [], 0
            buckets.append(newest[value.dtype])
        newest[value.dtype].append(number)
        sizes[value.dtype] += value.nbytes
        if sizes[value.dtype] >= limit:
            del newest[value.dtype]
            limit = _BUCKET_BYTES
    return buckets


class AllReduceExchange:
    """Adds a bucket over all ranks in the backend's order."""

    def __init__(self, wire: torch.device) -> None:
        self._wire = wire

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send this rank's sum."""
        assert not notes
        self._sent = sums[0].to(self._wire)
        self._work = dist.all_reduce(self._sent, async_op=True)

    def advance(self, total: Tensor) -> bool:
        """Wait for the sum."""
        finish(self._work)
        total.copy_(self._sent)
        return True


class GradientSum:
    """Adds the gradients and notes of all lanes of an update; the sum ends up in each parameter's `grad`.

    In a world of several ranks a bucket is sent as soon as the last lane's backward has computed it.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lanes: int,
        world: World,
        clock: PhaseClock,
        *,
        exact: bool,
    ) -> None:
        self._world, self._clock, self._exact = world, clock, exact
        self.idle = 0
        """Extra forwards that this rank must run for others: none, since each has all weights."""
        mine = share(lanes, world.rank, world.size)
        merges = merges_after(mine, lanes) if exact else [0] + [1] * (len(mine) - 1)
        self._stack = LaneStack(parameters, merges)
        self._buckets: list[_Bucket] = []
        self._pending: list[_Bucket] = []
        self._next = 0
        self._overlaps = False
        self._side_stream: torch.cuda.Stream | None = None
        if world.size > 1:
            self._shape, self._wire = TreeShape.of(lanes, world), wire_device(world)
            if self._wire.type == "cuda":
                self._side_stream = torch.cuda.Stream(self._wire)  # type: ignore[no-untyped-call]
            self._set_up_buckets(parameters)

    def _set_up_buckets(self, parameters: list[nn.Parameter]) -> None:
        for numbers in make_buckets(parameters):
            values: list[Tensor] = [parameters[number].detach() for number in numbers]
            size = sum(value.numel() for value in values)
            total = values[0].new_empty(size)
            exchange: Exchange = AllReduceExchange(self._wire)
            if self._exact:
                exchange = choose_exchange(total, 0, self._shape, self._wire)
            bucket = _Bucket(numbers, values, size, 0, total, exchange)
            self._buckets.append(bucket)
            for number in numbers:
                hook = partial(self._on_gradient, bucket)
                parameters[number].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start an update without gradients."""
        self._stack.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.numbers)

    def before_lane(self, *, last: bool) -> None:
        """Prepare for the backward of a lane; that of the last one sends gradients."""
        self._stack.before_lane()
        self._overlaps = last and self._stack.is_complete

    def after_lane(self, note: Note) -> None:
        """Take the gradients of a lane that is not this rank's last."""
        self._stack.push(self._stack.after_lane(note))

    def finish(self, note: Note) -> Note:
        """Take the last lane; leave the sum over all ranks in `grad`, and return that of the notes."""
        self._overlaps = False
        stack = self._stack
        now = stack.after_lane(note)
        if self._world.size > 1:
            return self._finish_across()
        for _ in range(stack.left):
            now = added(stack.sums.pop(), now)
        for parameter, value in zip(stack.parameters, now, strict=True):
            parameter.grad = value
        return stack.notes[0]

    def _on_gradient(self, bucket: _Bucket, parameter: Tensor) -> None:
        """Send complete buckets during the last backward. All ranks send them in the same order."""
        if not self._overlaps:
            return
        bucket.waiting -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._clock.bucket_ready()
            self._send(self._buckets[self._next])
            self._clock.enter("backward")

    def _finish_across(self) -> Note:
        self._clock.bucket_ready()
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        total = self._total_note()
        with self._on_side_stream():
            while self._pending:
                self._advance(self._pending)
        if self._side_stream is not None:
            torch.cuda.current_stream(self._wire).wait_stream(self._side_stream)
        for bucket in self._buckets:
            views = laid_out(bucket.total, bucket.parameters)
            for number, view in zip(bucket.numbers, views, strict=True):
                self._stack.parameters[number].grad = view
        incomplete, moves = total.moves[0], total.moves[1:]
        if incomplete:
            self._drop_unreached()
        return total._replace(moves=moves)

    def _send(self, bucket: _Bucket) -> None:
        self._next += 1
        with self._on_side_stream():
            bucket.exchange.start(self._subtree_sums(bucket), [])
            # On a side stream a wait does not block the host: the exchange is finished at once.
            earlier = self._pending
            self._pending = [*earlier, bucket]
            self._advance(earlier if self._side_stream is None else self._pending)

    def _advance(self, buckets: list[_Bucket]) -> None:
        """Advance some buckets by one stage."""
        for bucket in list(buckets):
            if bucket.exchange.advance(bucket.total):
                self._pending.remove(bucket)

    def _subtree_sums(self, bucket: _Bucket) -> list[Tensor]:
        """Return the flat sums of this rank's whole subtrees, the last lane included."""
        stack = self._stack
        newest = _flat(bucket, [stack.parameters[number].grad for number in bucket.numbers])
        rows = [_flat(bucket, bucket.choose(subtree)) for subtree in stack.sums]
        for _ in range(stack.left):
            newest.add_(rows.pop())
        return [*rows, newest]

    def _total_note(self) -> Note:
        """Return the sum of the notes of all ranks, with one more number: the ranks with missing gradients."""
        notes = []
        for row, note in enumerate(self._stack.notes):
            incomplete = float(not row and not self._stack.is_complete)
            moves = numpy.concatenate([[incomplete], note.moves])
            notes.append(note._replace(moves=moves).to_tensor())
        if not self._exact:
            return Note.from_tensor(sum_across(self._world, notes[0]))
        nothing = torch.empty(0, device=self._wire)
        message = AllGatherExchange(nothing, len(notes[0]), self._shape, self._wire)
        message.start([nothing] * len(notes), notes)
        message.advance(nothing)
        return Note.from_tensor(message.total_note().cpu())

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


def _flat(bucket: _Bucket, values: LaneGradients) -> Tensor:
    """Return gradients as one flat tensor, with zeros for those that are missing."""
    flat = torch.empty_like(bucket.total)
    places, given = [], []
    for place, value in zip(laid_out(flat, bucket.parameters), values, strict=True):
        if value is None:
            place.zero_()
        else:
            places.append(place)
            given.append(value)
    if places:
        torch._foreach_copy_(places, given)
    return flat
