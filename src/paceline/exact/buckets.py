"""How the lane gradients of one optimizer's parameters are added, on this rank and over all ranks.

The calls of an update come in this order, and `step.py` makes them: `begin`; for each lane `before_lane`, the
backward of the lane, and `after_lane`, which the last lane leaves out; then `finish`, which leaves the sum over all
ranks in each parameter's `grad` and returns that of the rows.

Along the fixed tree (`exact`) the bits do not depend on the number of ranks; otherwise the order is free. A parameter
without a gradient in some lanes counts as zeros there. Without a gradient in every lane of the step it has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError, TrainingError
from paceline.exact.exchange import (
    AllGatherExchange,
    AllReduceExchange,
    Exchange,
    PowerSgdExchange,
    TreeShape,
    choose_exchange,
    sum_of_rows,
)
from paceline.exact.row import Rows, merge_rows
from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.telemetry.phases import PhaseClock
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

    In a world of several ranks a bucket is sent as soon as the last lane's backward has computed it. The rows travel
    with the last bucket if that is small, and otherwise after it.

    When is a gradient computed? torch writes the gradient of a parameter once per backward, however often the
    parameter was used. But a backward that runs inside of another writes it again: `torch.utils.checkpoint` with
    use_reentrant=True does so once per checkpoint. So each lane counts how often a gradient was written. The first
    update sends nothing early. A bucket that has a parameter with several writes is never sent early. If a gradient is
    written after it was sent, the update fails. Ranks may differ in when they send, never in the order.
    """

    extra_lanes = 0

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
        self._rows_exchange: AllGatherExchange | None = None
        # Of the last bucket, by the length of a row; all are kept: captured updates use their memory.
        self._last_exchanges: dict[int, Exchange] = {}
        self._row_length = 0
        self._rows: Rows
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

    def _exchange_of(self, values: list[Tensor], total: Tensor, row_length: int) -> Exchange:
        chosen = choose_exchange(total, row_length, self._shape, self._wire)
        carries_rows = isinstance(chosen, AllGatherExchange) and chosen.carries_rows
        if self._exact or (carries_rows and self._compression == "none"):
            return chosen
        if self._compression == "powersgd":
            return PowerSgdExchange(values, self._world.size)
        return AllReduceExchange(self._wire, self._compression)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Start an update without gradients."""
        self._stack.clear()
        self._next = 0
        self._pending.clear()  # a capture may have failed
        for bucket in self._buckets:
            bucket.waiting, bucket.is_sent, bucket.sent = len(bucket.numbers), False, None

    def before_lane(self, rows: Rows, *, last: bool) -> None:
        """Prepare for the backward of a lane; that of the last one sends gradients and the rows of this rank's lanes."""
        self._rows = rows
        if any(self._stack.writes):
            raise ConfigError(
                "the loss function called backward(): its gradients would be lost",
                fix="return the sum of all losses; Paceline calls backward. For a derivative within the loss, call torch.autograd.grad",
            )
        self._stack.before_lane()
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

    def finish(self, results: LaneResults | None = None) -> Tensor:
        """Take the last lane; leave the sum over all ranks in `grad`, and return that of the rows.

        `results`: what `lane_results` returned, if it has taken the last lane.
        """
        self._overlaps = False
        stack = self._stack
        now = self._gradients_of_lane() if results is None else results.newest
        if self._world.size > 1:
            return self._sum_across()
        for _ in range(stack.merges_left):
            now = added(stack.sums.pop(), now)
        for parameter, value in zip(stack.parameters, now, strict=True):
            parameter.grad = value
        if not self._updates:
            self.close()
        self._updates += 1
        self.is_complete = stack.is_complete
        return self._rows_to_send()[0]

    def lane_results(self) -> LaneResults:
        """Return the gradients of this rank's lanes, before they are sent; for a step that is captured."""
        return LaneResults(self._gradients_of_lane(), list(self._stack.sums))

    def send_results(self, lanes: LaneResults, rows: Rows) -> Tensor:
        """Add the gradients of replayed lanes over all ranks, as if the lanes had run."""
        self.begin()
        self._rows = rows
        self._stack.load(lanes.newest, lanes.sums)
        return self._sum_across()

    def use_totals(self) -> None:
        """Continue after a replayed exchange, in which every lane of this rank gave every parameter a gradient."""
        self._stack.clear()
        self._stack.has_gradient = [True] * len(self._stack.parameters)

    def _on_gradient(self, bucket: Bucket, number: int, parameter: Tensor) -> None:
        """Send complete buckets during the last backward. All ranks send them in the same order."""
        writes = self._stack.writes
        writes[number] += 1
        if writes[number] > 1:
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

    @property
    def lanes_are_complete(self) -> bool:
        """Whether every lane of this rank gave every parameter a gradient."""
        return self._stack.is_complete

    @property
    def can_capture_exchange(self) -> bool:
        """Whether the exchange can be part of a CUDA graph: it runs on the GPU alone."""
        return self._side_stream is not None and self._compression != "powersgd"

    def drop_missing(self, ranks: float) -> None:
        """Drop the gradients that no lane has given, if some ranks miss one. Every rank must call this."""
        if self._world.size > 1:
            self.is_complete = not ranks
        if ranks:
            self._drop_unreached()

    def _sum_across(self) -> Tensor:
        """Leave the sums over all ranks in `grad`; return that of the rows."""
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
        if self._rows_exchange is not None:
            return self._rows_exchange.total_row(self._rows.layout.largest)
        return sum_of_rows(self._rows_to_send(), self._shape, self._wire, self._rows.layout.largest)

    def place_totals(self) -> None:
        """Let each parameter's `grad` be its part of the sum over all ranks."""
        for bucket in self._buckets:
            for number, view in zip(bucket.numbers, bucket.views, strict=True):
                self._stack.parameters[number].grad = view

    def _send(self, bucket: Bucket) -> None:
        self._next += 1
        bucket.is_sent = True
        is_last = self._next == len(self._buckets)
        with self._on_side_stream():
            rows = self._carried_rows(bucket) if is_last else []
            bucket.exchange.start(self._subtree_sums(bucket), rows)
            # On a side stream a wait does not block the host: the exchange is finished at once.
            earlier = self._pending
            self._pending = [*earlier, bucket]
            self._advance(earlier if self._side_stream is None else self._pending)

    def _carried_rows(self, last: Bucket) -> list[Tensor]:
        """Return the rows if the last bucket carries them; otherwise they are sent alone after it."""
        rows = self._rows_to_send()
        if len(rows[0]) != self._row_length:
            self._row_length = len(rows[0])
            self._choose_last_exchange(last)
        return rows if self._rows_exchange is not None else []

    def _choose_last_exchange(self, last: Bucket) -> None:
        """Let the last bucket carry rows of this length, if it is small enough."""
        self._rows_exchange = None
        if self._compression != "none":
            return
        if self._row_length not in self._last_exchanges:
            exchange = self._exchange_of(last.parameters, last.total, self._row_length)
            self._last_exchanges[self._row_length] = exchange
        last.exchange = self._last_exchanges[self._row_length]
        if isinstance(last.exchange, AllGatherExchange) and last.exchange.carries_rows:
            self._rows_exchange = last.exchange

    def _advance(self, buckets: list[Bucket]) -> None:
        """Advance some buckets by one stage."""
        for bucket in list(buckets):
            if bucket.exchange.advance(bucket.total):
                self._pending.remove(bucket)

    def _subtree_sums(self, bucket: Bucket) -> list[Tensor]:
        """Return the flat sums of this rank's whole subtrees, the last lane included."""
        stack = self._stack
        gradients = [stack.parameters[number].grad for number in bucket.numbers]
        newest = bucket.flat(gradients)
        if self._overlaps and _is_checked(self._updates) and not _is_capturing(newest):
            bucket.sent = checksums(gradients)
        sums = [bucket.flat(bucket.choose(subtree)) for subtree in stack.sums]
        for _ in range(stack.merges_left):
            newest.add_(sums.pop())
        return [*sums, newest]

    def _rows_to_send(self) -> list[Tensor]:
        """Return the sums of the rows of this rank's whole subtrees; the first says whether this rank misses gradients."""
        if self._world.size > 1 and not (self._overlaps or self._stack.is_complete):
            self._rows.numbers[0, self._rows.layout.missing] = 1.0
        return merge_rows(self._rows.of_lanes, self._merges, self._rows.layout.largest)

    def _drop_unreached(self) -> None:
        """Remove the gradients of parameters that no lane of any rank has reached. Every rank calls this."""
        reached = sum_across(
            self._world, torch.tensor(self._stack.has_gradient, dtype=torch.float64)
        )
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


# Buckets of gradients that cross in one message, and where each gradient lies in their flat memory.


FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first message starts early
OTHER_BUCKET_BYTES = 25 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of each size in bytes."""


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients cross in one message."""

    numbers: list[int]
    parameters: list[Tensor]
    total: Tensor
    exchange: Exchange
    waiting: int = 0
    """Parameters whose gradient the last lane has not computed yet."""
    is_early: bool = True
    """Whether a gradient is final when it was written once, so that the bucket may be sent during backward."""
    is_sent: bool = False
    """Whether it was sent in this update."""
    sent: Tensor | None = None
    """Checksums of this rank's gradients when they were sent, in the updates that are checked."""

    def __post_init__(self) -> None:
        self._sizes = [value.numel() for value in self.parameters]
        self._forms = [(value.shape, _dense_strides(value)) for value in self.parameters]
        self.views = self.laid_out(self.total)
        """Where the sum of each parameter's gradient lies in `total`."""

    def laid_out(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each parameter in a flat tensor, with the strides of the parameter."""
        pieces = zip(torch.split(flat, self._sizes), self._forms, strict=True)
        return [piece.as_strided(*form) for piece, form in pieces]

    def flat(self, values: LaneGradients) -> Tensor:
        """Return gradients as one flat tensor, with zeros for those that are missing."""
        flat = torch.empty_like(self.total)
        places = self.laid_out(flat)
        if any(value is None for value in values):
            flat.zero_()
            given = [pair for pair in zip(places, values, strict=True) if pair[1] is not None]
            places, values = [place for place, _ in given], [value for _, value in given]
        if places:
            torch._foreach_copy_(places, values)  # type: ignore[arg-type]
        return flat

    def choose(self, gradients: LaneGradients) -> LaneGradients:
        """Return the gradients of its parameters, of those of all parameters."""
        return [gradients[number] for number in self.numbers]


def make_buckets(
    parameters: Sequence[nn.Parameter],
    first_bytes: int = FIRST_BUCKET_BYTES,
    other_bytes: int = OTHER_BUCKET_BYTES,
) -> list[list[int]]:
    """Return the numbers of the parameters of each bucket; backward reaches the last parameters first.

    >>> make_buckets([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1 << 18)), nn.Parameter(torch.zeros(2))])
    [[2, 1], [0]]
    """
    buckets: list[list[int]] = []
    newest: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    limit = first_bytes
    for number in reversed(range(len(parameters))):
        value = parameters[number]
        if value.dtype not in newest:
            newest[value.dtype], sizes[value.dtype] = [], 0
            buckets.append(newest[value.dtype])
        newest[value.dtype].append(number)
        sizes[value.dtype] += value.nbytes
        if sizes[value.dtype] >= limit:
            del newest[value.dtype]
            limit = other_bytes
    return buckets


def checksums(values: LaneGradients) -> Tensor:
    """Return a number for each gradient that changes with any of its bits; it stays on their device.

    >>> checksums([torch.tensor([1.0, 2.0]), None]).tolist() == checksums([torch.tensor([1.0, 2.5]), None]).tolist()
    False
    """
    sums = []
    device = next((value.device for value in values if value is not None), None)
    for value in values:
        if value is None:
            sums.append(torch.zeros((), dtype=torch.int64, device=device))
        else:
            sums.append(value.view(_INTEGERS[value.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums)


def _dense_strides(value: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor that fills its memory without gaps; otherwise those of its shape in order.

    >>> image = torch.zeros(1, 2, 2, 1).to(memory_format=torch.channels_last)
    >>> _dense_strides(image), _dense_strides(torch.zeros(2, 3)[:, :2])
    ((4, 1, 2, 2), (2, 1))
    """
    dimensions = zip(value.stride(), value.shape, strict=True)
    expected = 1
    for stride, size in sorted(pair for pair in dimensions if pair[1] != 1):
        if stride != expected:
            return torch.empty(value.shape, device="meta").stride()
        expected *= size
    return value.stride()


# Sums of gradients over a rank's own lanes: whole subtrees of the fixed tree.
#
# A parameter without a gradient in some lanes counts as zeros there.


LaneGradients = list[Tensor | None]
"""The gradient of each parameter; None for one that a lane did not reach."""


class LaneResults(NamedTuple):
    """The gradients of a rank's lanes: those of the newest lanes, and sums of whole subtrees."""

    newest: LaneGradients
    sums: list[LaneGradients]


class WrittenAgain(Exception):
    """A lane has written a gradient several times into the sum with its sibling; earlier lanes wrote it once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class LaneStack:
    """Gradient sums of complete subtrees of this rank's lanes, merged as soon as both halves exist.

    The backward of a lane adds its gradients to those of its sibling in the tree, in place. That is the sum of two
    lanes only if it writes each gradient once. A backward that runs inside of another (`torch.utils.checkpoint` with
    use_reentrant=True) writes a gradient several times, and (a + b) + c is not a + (b + c). Such parameters are found
    by their number of writes in a lane without sibling, which is the first lane of every rank; they are added after
    the lane instead.
    """

    def __init__(
        self, parameters: list[nn.Parameter], merges: list[int], *, exact: bool = True
    ) -> None:
        self.parameters, self._merges, self._exact = parameters, merges, exact
        self._rewritten: set[int] = set()
        """Numbers of the parameters whose gradient a lane has written more than once."""
        self.clear()

    def clear(self) -> None:
        """Discard the previous update."""
        self._lane = self.merges_left = 0
        self.writes = [0] * len(self.parameters)
        """How often each gradient was written since the previous lane; counted by hooks of the gradient sum."""
        self.sums: list[LaneGradients] = []
        self._sibling: LaneGradients = []
        self._apart: dict[int, Tensor | None] = {}
        """Gradients of the sibling that are added after the lane."""
        self._versions: list[int] = []
        self.has_gradient = [False] * len(self.parameters)
        """Whether any lane so far gave the parameter a gradient."""
        self.is_complete = True
        """Whether every lane so far gave every parameter a gradient."""

    def before_lane(self) -> None:
        """Let the backward of a lane accumulate into the gradients of its sibling, if it has one."""
        merges = self._merges[self._lane]
        self._lane += 1
        self._has_sibling, self.merges_left = merges > 0, max(0, merges - 1)
        self._sibling = self.sums.pop() if merges else [None] * len(self.parameters)
        self._apart = {}
        for number in self._rewritten if merges else ():
            self._apart[number], self._sibling[number] = self._sibling[number], None
        self._versions = [_writes(value) for value in self._sibling] if merges else []
        for parameter, value in zip(self.parameters, self._sibling, strict=True):
            parameter.grad = value

    def after_lane(self) -> LaneGradients:
        """Return the gradients after a lane's backward, those of its sibling included."""
        now = [parameter.grad for parameter in self.parameters]
        given = self._given(now)
        self._rewritten.update(number for number, writes in enumerate(self.writes) if writes > 1)
        self.writes = [0] * len(self.parameters)
        if not (self.is_complete and all(given)):
            self._pad(now, given)
        else:
            self.has_gradient = given
        for number, earlier in self._apart.items():
            [now[number]] = added([earlier], [now[number]])
            self.parameters[number].grad = now[number]
        return now

    def _pad(self, now: LaneGradients, given: list[bool]) -> None:
        """Let a parameter that only one of two lanes has reached have the bits of a sum with zeros."""
        self.is_complete = False
        padded: list[Tensor] = []
        for number, (value, sibling) in enumerate(zip(now, self._sibling, strict=True)):
            self.has_gradient[number] |= given[number]
            is_alone = (sibling is None or not given[number]) and number not in self._apart
            if value is not None and self._has_sibling and is_alone:
                padded.append(value)
        add_zeros(padded)

    def _given(self, now: LaneGradients) -> list[bool]:
        """Return whether the backward of the lane gave each parameter a gradient."""
        if not self._has_sibling:
            return [value is not None for value in now]
        given = []
        for number, value in enumerate(now):
            sibling, written = self._sibling[number], _writes(value) - self._versions[number]
            given.append(value is not sibling or written != 0)
            if self._exact and sibling is not None and value is sibling and written > 1:
                raise WrittenAgain(number)
        return given

    def load(self, newest: LaneGradients, sums: list[LaneGradients]) -> None:
        """Use the gradients of lanes that were replayed."""
        for parameter, value in zip(self.parameters, newest, strict=True):
            parameter.grad = value
        self.sums = list(sums)
        self.has_gradient = [True] * len(self.parameters)
        self.merges_left = max(0, self._merges[-1] - 1)

    def push(self, now: LaneGradients) -> None:
        """Merge a lane that is not this rank's last with the subtrees that it completes."""
        for _ in range(self.merges_left):
            now = added(self.sums.pop(), now)
        self.sums.append(now)


def _writes(value: Tensor | None) -> int:
    """Return how often a tensor was written in place; -1 without a tensor."""
    return -1 if value is None else value._version  # noqa: SLF001 - torch has no public name for it


def added(earlier: LaneGradients, later: LaneGradients) -> LaneGradients:
    """Return the sums of two subtrees, in the memory of the later one; a missing gradient counts as zeros."""
    both = [(a, b) for a, b in zip(earlier, later, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([b for _, b in both], [a for a, _ in both])
    alone = []
    result: LaneGradients = []
    for a, b in zip(earlier, later, strict=True):
        if (a is None) is not (b is None):
            alone += [value for value in (a, b) if value is not None]
        result.append(a if b is None else b)
    add_zeros(alone)
    return result


def add_zeros(values: list[Tensor]) -> None:
    """Add 0.0, which turns -0.0 into 0.0: the bits of a sum with zeros that another rank has sent."""
    if values:
        torch._foreach_add_(values, 0.0)
