"""torch's DistributedDataParallel, with gradients summed along the fixed tree while backward runs.

No postponed annotations here: DDP looks at the types of a hook's parameters.
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
    """Return a view of each parameter in a bucket, as DDP lays it out: in the order that its own memory has.

    DDP's own `gradients` give views in the usual order, which is wrong for weights that lie channels last.

    >>> image = torch.zeros(1, 2, 2, 1).to(memory_format=torch.channels_last)
    >>> laid_out(torch.arange(5), [image, torch.zeros(1)])[0].flatten().tolist()
    [0, 2, 1, 3]
    """
    pieces = torch.split(flat, [value.numel() for value in parameters])
    return [
        piece.as_strided(value.shape, value.stride())
        if _is_dense(value)
        else piece.view(value.shape)
        for piece, value in zip(pieces, parameters, strict=True)
    ]


def filled(like: Tensor, parameters: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return values of all parameters of a bucket, one after the other, as DDP lays them out."""
    flat = torch.empty_like(like)
    torch._foreach_copy_(laid_out(flat, parameters), values)
    return flat


def _is_dense(value: Tensor) -> bool:
    """Return whether a tensor fills its memory, in whatever order."""
    expected = 1
    for stride, size in sorted(
        pair for pair in zip(value.stride(), value.shape, strict=True) if pair[1] != 1
    ):
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
    """The lane sum of a rank under DDP: the communication hook, and what it needs from step to step."""

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
        self._under_way: list[_PendingBucket] = []
        self._noted: AllGatherExchange | None = None
        self.clock = PhaseClock()
        """What is told when gradients are ready, and when backward goes on."""
        self._side_stream = torch.cuda.Stream(self._device) if self._wire.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start a step with no gradients."""
        self._stack.clear()
        self._noted = None

    def before_lane(self, note: Note) -> None:
        """Take a lane's note; the hook adds the last lane's gradients bucket by bucket."""
        self._stack.before_lane(note)

    def after_lane(self) -> None:
        """Add one lane into the part of the tree that is this rank's."""
        self._stack.after_lane()

    def finish(self) -> Note:
        """Return the sum of the notes; DDP has put the gradients in place."""
        if self._noted is None or self._under_way:
            raise missing_gradient(len(self._stack.parameters), 1)
        return Note.from_tensor(self._noted.total_note().cpu())

    def total(self, note: Note) -> Note:
        """Return the note: the tree has added it over all ranks."""
        return note

    def hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Sum one bucket. DDP calls this on every rank in the same order."""
        self.clock.bucket_ready()
        done = self._sum_bucket(bucket)
        if not bucket.is_last():
            self.clock.enter("backward")
        return done

    def _sum_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        with self._on_side_stream():
            total = bucket.buffer()
            sums = self._subtree_sums(bucket, total)
            done: Future[Tensor] = Future(
                devices=[] if total.device.type == "cpu" else [total.device]
            )
            self._start(
                _PendingBucket(self._exchange(bucket.index(), total), total, done),
                sums,
                last=bucket.is_last(),
            )
            # Each bucket starts before the one before it is waited for, so that messages and backward overlap.
            # On a side stream a wait does not hold the host, and there is nothing to put off.
            self._advance(everything=bucket.is_last() or self._side_stream is not None)
            return done

    def _subtree_sums(self, bucket: GradBucket, buffer: Tensor) -> list[Tensor]:
        """Add this bucket's part of the last lane to earlier lanes, and return the sums of whole subtrees."""
        held = self._stack.gradients
        if not held:
            return [buffer]
        parameters = bucket.parameters()
        numbers = [self._index[id(parameter)] for parameter in parameters]
        kept = len(held) - self._stack.pending_additions
        for earlier in reversed(held[kept:]):
            torch._foreach_add_(
                laid_out(buffer, parameters), [earlier[number] for number in numbers]
            )
        return [
            filled(buffer, parameters, [sums[number] for number in numbers]) for sums in held[:kept]
        ] + [buffer]

    def _exchange(self, index: int, buffer: Tensor) -> Exchange:
        """Return the exchange for a bucket; DDP lays its buckets out anew after the first step."""
        note_length = 0 if self._noted else NOTE_HEAD + len(self._stack.notes[0].moves)
        layout = (buffer.numel(), note_length, buffer.dtype)
        if index not in self._exchanges or self._exchanges[index][0] != layout:
            self._exchanges[index] = (
                layout,
                choose_exchange(buffer, note_length, self._shape, self._wire),
            )
        return self._exchanges[index][1]

    def _start(self, bucket: _PendingBucket, sums: list[Tensor], *, last: bool) -> None:
        """Send a bucket; the notes ride on the first one that is small enough, or go alone with the last."""
        notes = [note.to_tensor() for note in self._stack.notes] if self._noted is None else []
        if (
            notes
            and isinstance(bucket.exchange, AllGatherExchange)
            and bucket.exchange.carries_notes
        ):
            self._noted = bucket.exchange
        else:
            if notes and last:
                self._send_notes(notes)
            notes = []
        bucket.exchange.start(sums, notes)
        self._under_way.append(bucket)

    def _send_notes(self, notes: list[Tensor]) -> None:
        """Send the notes on their own, where every bucket is too large to carry them."""
        nothing = torch.empty(0, device=self._wire)
        self._noted = AllGatherExchange(nothing, len(notes[0]), self._shape, self._wire)
        self._noted.start([nothing] * len(notes), notes)
        self._noted.advance(nothing)

    def _advance(self, *, everything: bool) -> None:
        """Take the buckets under way one stage further, the newest excepted; or all of them to the end."""
        waiting = self._under_way[:] if everything else self._under_way[:-1]
        while waiting:
            left = []
            for bucket in waiting:
                if bucket.exchange.advance(bucket.total):
                    bucket.done.set_result(bucket.total)
                    self._under_way.remove(bucket)
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


# The rule for buffers is our own (train/buffers.py): DDP's would copy those of rank 0. Torch 2.13 renamed the option.
_OWN_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
DDP_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, _OWN_BUFFERS: False}


class TreeDDP(DistributedDataParallel):
    """DistributedDataParallel whose gradients are the same bits on any number of ranks."""

    def __init__(self, module: nn.Module, lanes: int, world: World) -> None:
        super().__init__(module, **DDP_OPTIONS)
        self.reduction = TreeReduction(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lanes,
            world,
        )
        self.register_comm_hook(self.reduction, TreeReduction.hook)
