"""DistributedDataParallel with gradients summed along the fixed tree during backward.

No postponed annotations here: DDP checks the types of a hook's parameters.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.telemetry.phases import PhaseClock
from paceline.train.bucket_exchange import AllGatherExchange, Exchange, TreeShape, choose_exchange
from paceline.train.lane_sum import TreeStack, missing_gradient
from paceline.train.note import NOTE_HEAD, Note
from paceline.world.collectives import wire_device
from paceline.world.world import World


def laid_out(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return a view of each parameter in a bucket with DDP's layout: the strides of the parameter.

    DDP's `gradients` returns contiguous views, which are wrong for weights in channels-last memory format.

    >>> image = torch.zeros(1, 2, 2, 1).to(memory_format=torch.channels_last)
    >>> laid_out(torch.arange(5), [image, torch.zeros(1)])[0].flatten().tolist()
    [0, 2, 1, 3]
    """
    pieces = torch.split(flat, [value.numel() for value in parameters])
    views = []
    for piece, value in zip(pieces, parameters, strict=True):
        if _is_dense(value):
            views.append(piece.as_strided(value.shape, value.stride()))
        else:
            views.append(piece.view(value.shape))
    return views


def filled(like: Tensor, parameters: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return a flat copy of one value per parameter of a bucket, with DDP's layout."""
    flat = torch.empty_like(like)
    torch._foreach_copy_(laid_out(flat, parameters), values)
    return flat


def _is_dense(value: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dimensions."""
    dimensions = zip(value.stride(), value.shape, strict=True)
    expected = 1
    for stride, size in sorted(pair for pair in dimensions if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(eq=False)
class _PendingBucket:
    exchange: Exchange
    total: Tensor
    done: Future[Tensor]


class TreeReduction:
    """The lane sum under DDP: a communication hook and its state."""

    scale = 1.0
    totals_are_global = True
    idle = 0

    def __init__(self, parameters: list[nn.Parameter], lanes: int, world: World) -> None:
        self._stack = TreeStack(parameters, lanes, world.rank, world.size)
        self._index = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._shape = TreeShape.of(lanes, world)
        self._wire = wire_device(world)
        self._device = torch.device(world.device)
        self._exchanges: dict[int, tuple[tuple[int, int, torch.dtype], Exchange]] = {}
        self._pending: list[_PendingBucket] = []
        self._notes_exchange: AllGatherExchange | None = None
        self.clock = PhaseClock()
        """Notified when gradients are ready and when backward continues."""
        self._side_stream = torch.cuda.Stream(self._device) if self._wire.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start a step without gradients."""
        self._stack.clear()
        self._notes_exchange = None

    def before_lane(self, note: Note) -> None:
        """Take a lane's note; the hook adds the last lane's gradients bucket by bucket."""
        self._stack.before_lane(note)

    def after_lane(self) -> None:
        """Add one lane to this rank's part of the tree."""
        self._stack.after_lane()

    def finish(self) -> Note:
        """Return the sum of the notes; DDP has written the gradients."""
        if self._notes_exchange is None or self._pending:
            raise missing_gradient(len(self._stack.parameters), 1)
        return Note.from_tensor(self._notes_exchange.total_note().cpu())

    def total(self, note: Note) -> Note:
        """Return the note as it is: `finish` has added it over all ranks."""
        return note

    def hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce one bucket. DDP calls this on every rank in the same order."""
        self.clock.bucket_ready()
        done = self._sum_bucket(bucket)
        if not bucket.is_last():
            self.clock.enter("backward")
        return done

    def _sum_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        with self._on_side_stream():
            total = bucket.buffer()
            sums = self._subtree_sums(bucket, total)
            devices: list[int | str | torch.device] = []
            if total.device.type != "cpu":
                devices.append(total.device)
            done: Future[Tensor] = Future(devices=devices)
            pending = _PendingBucket(self._exchange(bucket.index(), total), total, done)
            self._start(pending, sums, last=bucket.is_last())
            # Each bucket starts before the previous one is waited for, so that messages and backward overlap.
            # On a side stream a wait does not block the host, so nothing is postponed.
            self._advance(everything=bucket.is_last() or self._side_stream is not None)
            return done

    def _subtree_sums(self, bucket: GradBucket, buffer: Tensor) -> list[Tensor]:
        """Add the last lane's part of this bucket to earlier lanes; return the sums of whole subtrees."""
        stack = self._stack.gradients
        if not stack:
            return [buffer]
        parameters = bucket.parameters()
        numbers = [self._index[id(parameter)] for parameter in parameters]
        kept = len(stack) - self._stack.pending_additions
        for earlier in reversed(stack[kept:]):
            values = [earlier[number] for number in numbers]
            torch._foreach_add_(laid_out(buffer, parameters), values)
        sums = []
        for subtree in stack[:kept]:
            values = [subtree[number] for number in numbers]
            sums.append(filled(buffer, parameters, values))
        return [*sums, buffer]

    def _exchange(self, index: int, buffer: Tensor) -> Exchange:
        """Return the exchange for a bucket; DDP changes its buckets after the first step."""
        note_length = 0 if self._notes_exchange else NOTE_HEAD + len(self._stack.notes[0].moves)
        layout = (buffer.numel(), note_length, buffer.dtype)
        if index not in self._exchanges or self._exchanges[index][0] != layout:
            chosen = choose_exchange(buffer, note_length, self._shape, self._wire)
            self._exchanges[index] = layout, chosen
        return self._exchanges[index][1]

    def _start(self, bucket: _PendingBucket, sums: list[Tensor], *, last: bool) -> None:
        """Send a bucket. The first one that is small enough carries the notes; otherwise they follow the last."""
        notes: list[Tensor] = []
        if self._notes_exchange is None:
            notes = [note.to_tensor() for note in self._stack.notes]
        exchange = bucket.exchange
        if notes and isinstance(exchange, AllGatherExchange) and exchange.carries_notes:
            self._notes_exchange = exchange
        else:
            if notes and last:
                self._send_notes(notes)
            notes = []
        exchange.start(sums, notes)
        self._pending.append(bucket)

    def _send_notes(self, notes: list[Tensor]) -> None:
        """Send the notes alone, because every bucket is too large to carry them."""
        nothing = torch.empty(0, device=self._wire)
        self._notes_exchange = AllGatherExchange(nothing, len(notes[0]), self._shape, self._wire)
        self._notes_exchange.start([nothing] * len(notes), notes)
        self._notes_exchange.advance(nothing)

    def _advance(self, *, everything: bool) -> None:
        """Advance pending buckets by one stage, except for the newest; or finish all of them."""
        waiting = self._pending[:] if everything else self._pending[:-1]
        while waiting:
            left = []
            for bucket in waiting:
                if bucket.exchange.advance(bucket.total):
                    bucket.done.set_result(bucket.total)
                    self._pending.remove(bucket)
                else:
                    left.append(bucket)
            waiting = left if everything else []

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        if self._side_stream is None:
            yield
            return
        self._side_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side_stream):
            yield


# train/buffers.py updates buffers; DDP would copy those of rank 0. Torch 2.13 renamed the option.
_OWN_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
DDP_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, _OWN_BUFFERS: False}


class TreeDDP(DistributedDataParallel):
    """DistributedDataParallel whose gradients have the same bits on any number of ranks."""

    def __init__(self, module: nn.Module, lanes: int, world: World) -> None:
        super().__init__(module, **DDP_OPTIONS)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.reduction = TreeReduction(trainable, lanes, world)
        self.register_comm_hook(self.reduction, TreeReduction.hook)
