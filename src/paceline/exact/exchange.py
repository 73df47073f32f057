"""How one bucket of subtree sums is added over all ranks, in the order of the fixed tree.

Two algorithms with the same bits. An all-gather sends every sum to every rank in one message. Large buckets of more
than two ranks are split instead: each rank collects one part from all (all-to-all), adds it, and sends the result to
all (all-gather). Where each rank has one subtree to send, both send the bytes of a ring all-reduce: the first on two
ranks, the second on any number. docs/contract.md counts the bytes of the other cases. Between nodes
`two_level_exchange` saves most of them; `exchange_choice` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from paceline.exact.row import added
from paceline.scale.batch import share
from paceline.scale.tree import additions, additions_to, whole_subtrees
from paceline.world.collectives import exchange, finish, gather
from paceline.world.node_groups import NodeGroups, node_groups
from paceline.world.world import World


@dataclass(frozen=True)
class TreeShape:
    """How many subtree sums each rank contributes, and the additions that remain."""

    rows: tuple[int, ...]
    additions: tuple[tuple[int, int], ...]
    rank: int
    lanes: int
    shares: tuple[range, ...]
    """The lanes of each rank."""
    world: World | None = None
    """The world, if all its ranks take part; its nodes may then add in two levels."""

    @classmethod
    def of(cls, lanes: int, world: World) -> TreeShape:
        """Return the shape for this rank of this world."""
        shares = [share(lanes, rank, world.size) for rank in range(world.size)]
        return replace(cls.over(shares, lanes, world.rank), world=world)

    @classmethod
    def over(cls, shares: Sequence[range], lanes: int, rank: int) -> TreeShape:
        """Return the shape for one rank of a group whose ranks have these lanes."""
        rows, nodes = [], []
        for lanes_of_rank in shares:
            subtrees = whole_subtrees(lanes_of_rank, lanes)
            rows.append(len(subtrees))
            nodes += subtrees
        return cls(tuple(rows), tuple(additions(nodes, lanes)), rank, lanes, tuple(shares))

    def add_up(self, rows: list[Tensor], total: Tensor) -> None:
        """Add all rows along the tree into `total`; overwrites the rows."""
        if not self.additions:
            total.copy_(rows[0])
            return
        for to, source in self.additions[:-1]:
            rows[to].add_(rows[source])
        to, source = self.additions[-1]
        torch.add(rows[to], rows[source], out=total)


class Exchange(Protocol):
    """The reduction of one bucket. All ranks start and advance their buckets in the same order."""

    def start(self, sums: list[Tensor], lane_rows: list[Tensor]) -> None:
        """Send this rank's subtree sums and rows."""

    def advance(self, total: Tensor) -> bool:
        """Wait for the current message and start the next stage; true once `total` holds the sum over all ranks."""


class AllGatherExchange:
    """Sends everything to every rank, rows included, in one message."""

    def __init__(
        self,
        like: Tensor,
        row_length: int,
        shape: TreeShape,
        wire: torch.device,
        among: ProcessGroup | None = None,
    ) -> None:
        self._shape, self._among = shape, among
        self.carries_rows = row_length > 0
        layout = _MessageLayout.of(like, row_length, max(shape.rows))
        self._sends_in_place = max(shape.rows) == 1 and not row_length and like.device == wire
        size, ranks = layout.size_bytes, len(shape.rows)
        self._sent = torch.zeros(size, dtype=torch.uint8, device=wire)
        self._received = torch.empty(size * ranks, dtype=torch.uint8, device=wire)
        self._my_sums, self._my_lane_rows = layout.views(self._sent, shape.rows[shape.rank])
        self._sums: list[Tensor] = []
        self._lane_rows: list[Tensor] = []
        for message, rows in zip(self._received.view(ranks, size), shape.rows, strict=True):
            sums, lane_rows = layout.views(message, rows)
            self._sums += sums
            self._lane_rows += lane_rows

    def start(self, sums: list[Tensor], lane_rows: list[Tensor]) -> None:
        """Send this rank's subtree sums and rows to all ranks."""
        if self._sends_in_place:
            self._work = gather(self._received, sums[0].view(torch.uint8), self._among)
            return
        for place, value in zip(self._my_sums + self._my_lane_rows, sums + lane_rows, strict=True):
            place.copy_(value)
        self._work = gather(self._received, self._sent, self._among)

    def advance(self, total: Tensor) -> bool:
        """Add the received sums along the tree."""
        finish(self._work)
        if total.device == self._sums[0].device:
            self._shape.add_up(self._sums, total)
        else:
            self._shape.add_up(self._sums, self._sums[0])
            total.copy_(self._sums[0])
        return True

    def total_row(self, largest: int) -> Tensor:
        """Return the sum of all rows, once the exchange is complete; of the last columns, the largest."""
        rows = list(self._lane_rows)
        for to, source in self._shape.additions:
            rows[to] = added(rows[to], rows[source], largest)
        # The next exchange overwrites what this one has received.
        return rows[0] if self._shape.additions else rows[0].clone()


@dataclass(frozen=True)
class _MessageLayout:
    """Where sums and rows lie in the message of one rank; all messages have the same size."""

    dtype: torch.dtype
    sum_bytes: int
    row_length: int
    lane_rows_at: int
    size_bytes: int

    @classmethod
    def of(cls, like: Tensor, row_length: int, max_rows: int) -> _MessageLayout:
        sum_bytes = like.numel() * like.element_size()
        lane_rows_at = max_rows * sum_bytes
        if row_length:
            lane_rows_at = -(-lane_rows_at // 8) * 8  # lane_rows are float64
        size_bytes = lane_rows_at + max_rows * row_length * 8
        return cls(like.dtype, sum_bytes, row_length, lane_rows_at, size_bytes)

    def views(self, message: Tensor, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the sums and of the rows in a message."""
        sums = []
        for row in range(rows):
            begin = row * self.sum_bytes
            sums.append(message[begin : begin + self.sum_bytes].view(self.dtype))
        if not self.row_length:
            return sums, []
        lane_rows = message[self.lane_rows_at :].view(torch.float64).view(-1, self.row_length)
        return sums, list(lane_rows[:rows])


class AllToAllExchange:
    """Each rank adds one part for all: all-to-all, addition, all-gather."""

    def __init__(
        self, like: Tensor, shape: TreeShape, wire: torch.device, among: ProcessGroup | None = None
    ) -> None:
        ranks, length = len(shape.rows), like.numel()
        self._shape, self._among = shape, among
        part = -(-length // ranks)
        self._sizes = [max(0, min(part, length - rank * part)) for rank in range(ranks)]
        my_size, my_rows = self._sizes[shape.rank], shape.rows[shape.rank]

        def empty(elements: int) -> Tensor:
            return torch.empty(elements, dtype=like.dtype, device=wire)

        self._sent = empty(my_rows * length)
        piece_sizes = [size for size in self._sizes for _ in range(my_rows)]
        self._places = torch.split(self._sent, piece_sizes)
        self._received = empty(sum(shape.rows) * my_size)
        self._received_sizes = [rows * my_size for rows in shape.rows]
        self._rows = list(self._received.view(sum(shape.rows), my_size))
        self._result = empty(part).zero_()
        self._gathered = empty(part * ranks)
        self._gathering = False

    def start(self, sums: list[Tensor], lane_rows: list[Tensor]) -> None:
        """Send every rank its part of this rank's subtree sums."""
        assert not lane_rows
        parts_of_sums = [torch.split(value, self._sizes) for value in sums]
        places = iter(self._places)
        for parts in zip(*parts_of_sums, strict=True):
            for part in parts:
                next(places).copy_(part)
        sent_sizes = [size * len(sums) for size in self._sizes]
        self._work = exchange(
            self._received, self._sent, self._received_sizes, sent_sizes, self._among
        )
        self._gathering = False

    def advance(self, total: Tensor) -> bool:
        """Add this rank's part and send it to all; then collect the parts of all."""
        finish(self._work)
        if self._gathering:
            total.copy_(self._gathered[: total.numel()])
            return True
        self._shape.add_up(self._rows, self._result[: self._rows[0].numel()])
        self._work = gather(self._gathered, self._result, self._among)
        self._gathering = True
        return False


def sum_of_rows(
    lane_rows: list[Tensor], shape: TreeShape, wire: torch.device, largest: int = 0
) -> Tensor:
    """Return the sum of the rows of all ranks, sent in a message of their own. Every rank must call this."""
    nothing = torch.empty(0, device=wire)
    message = AllGatherExchange(nothing, len(lane_rows[0]), shape, wire)
    message.start([nothing] * len(lane_rows), lane_rows)
    message.advance(nothing)
    return message.total_row(largest)


# How one bucket is added over several nodes: first within each node, then between the nodes, along the same tree.
#
# Each rank collects its slice of the sums of its node (all-to-all within the node) and adds what forms whole subtrees of
# the lanes of the node. The ranks that hold the same slice on all nodes add the remaining sums. Then each node collects the
# finished slices (all-gather within the node). Additions and their order are those of the tree, so the bits are those of
# one rank. Gradients cross the network already added, so a node sends about as many bytes as one rank would alone.


@dataclass(frozen=True)
class NodeShape:
    """How many subtree sums each rank of a node contributes, which additions the node allows, and which remain."""

    rows: tuple[int, ...]
    additions: tuple[tuple[int, int], ...]
    results: tuple[int, ...]
    """The rows that then hold the sums of the whole subtrees of the node."""
    local_rank: int
    between: TreeShape
    """The tree over the nodes, as if each were a rank."""

    @classmethod
    def of(cls, shape: TreeShape, per_node: int) -> NodeShape:
        """Return the shape for one rank, where each node has that many consecutive ranks."""
        lanes_of_nodes = []
        for first in range(0, len(shape.shares), per_node):
            last = first + per_node - 1
            lanes_of_nodes.append(range(shape.shares[first].start, shape.shares[last].stop))
        node, local_rank = divmod(shape.rank, per_node)
        rows, subtrees = [], []
        for lanes_of_rank in shape.shares[node * per_node : (node + 1) * per_node]:
            sums = whole_subtrees(lanes_of_rank, shape.lanes)
            rows.append(len(sums))
            subtrees += sums
        wanted = whole_subtrees(lanes_of_nodes[node], shape.lanes)
        additions, results = additions_to(subtrees, wanted)
        between = TreeShape.over(lanes_of_nodes, shape.lanes, node)
        return cls(tuple(rows), tuple(additions), tuple(results), local_rank, between)


class _Stage(Enum):
    WITHIN = auto()
    BETWEEN = auto()
    COLLECTING = auto()


class TwoLevelExchange:
    """Adds one slice of the bucket per local rank: within the node, then with that rank of the other nodes."""

    def __init__(
        self,
        like: Tensor,
        shape: NodeShape,
        wire: torch.device,
        groups: NodeGroups,
        between: Exchange,
    ) -> None:
        ranks, rows = groups.per_node, sum(shape.rows)
        self._shape, self._groups, self._between = shape, groups, between
        part = slice_length(like, ranks)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=like.dtype, device=wire)

        self._is_direct = like.numel() == part * ranks and like.device == wire
        """Whether sums can be sent from, and received into, the tensors that are given."""
        my_rows = shape.rows[shape.local_rank]
        self._sent = zeros(0 if self._is_direct and my_rows == 1 else ranks, my_rows, part)
        self._sent_sizes = [my_rows * part] * ranks
        self._received = zeros(rows, part)
        self._received_sizes = [rows * part for rows in shape.rows]
        self._result = zeros(part)
        self._gathered = zeros(0 if self._is_direct else part * ranks)
        self._stage = _Stage.WITHIN

    def start(self, sums: list[Tensor], lane_rows: list[Tensor]) -> None:
        """Send every rank of the node its slice of this rank's subtree sums."""
        assert not lane_rows
        sent = sums[0]
        if not self._is_direct or len(sums) > 1:
            sent = self._sent.view(-1)
            for row, value in enumerate(sums):
                self._place(row, value)
        received, sizes = self._received.view(-1), self._received_sizes
        self._work = exchange(received, sent, sizes, self._sent_sizes, self._groups.within)
        self._stage = _Stage.WITHIN

    def _place(self, row: int, value: Tensor) -> None:
        """Copy a sum into the message, slice by slice."""
        part = self._result.numel()
        whole, rest = divmod(value.numel(), part)
        self._sent[:whole, row].copy_(value[: whole * part].view(whole, part))
        if rest:
            self._sent[whole, row, :rest].copy_(value[whole * part :])

    def advance(self, total: Tensor) -> bool:
        """Add the slice within the node; then between nodes; then collect the slices of the node."""
        if self._stage is _Stage.WITHIN:
            finish(self._work)
            self._add_within()
            self._stage = _Stage.BETWEEN
        elif self._stage is _Stage.BETWEEN:
            if self._between.advance(self._result):
                gathered = total if self._is_direct else self._gathered
                self._work = gather(gathered, self._result, self._groups.within)
                self._stage = _Stage.COLLECTING
        else:
            finish(self._work)
            if not self._is_direct:
                total.copy_(self._gathered[: total.numel()])
            return True
        return False

    def _add_within(self) -> None:
        """Add what forms whole subtrees of the lanes of the node, and send these sums to the other nodes."""
        rows = list(self._received)
        for to, source in self._shape.additions:
            rows[to].add_(rows[source])
        self._between.start([rows[row] for row in self._shape.results], [])


def slice_length(like: Tensor, ranks: int) -> int:
    """Return how many elements of a bucket each of some ranks adds; the last slice may end with padding."""
    return -(-like.numel() // ranks)


# Which exchange adds a bucket: by its size, and by the number of ranks and nodes.


_SMALL_BYTES = 1 << 16  # below this size a second message costs more than the bytes it saves
# Above this size a message for the lane_rows alone costs less than copying the bucket.
_CARRIES_ROWS_BYTES = 1 << 20
# Two levels cost two or three messages more within the node. That pays once the sums of all ranks exceed this size.
_FLAT_BYTES = 1 << 20
_SMALL_SLICES_BYTES = 1 << 18  # slices of all nodes together


def choose_exchange(
    like: Tensor,
    row_length: int,
    shape: TreeShape,
    wire: torch.device,
    among: ProcessGroup | None = None,
) -> Exchange:
    """Return the cheapest exchange for a bucket of this size in this world; small buckets carry the rows.

    Every rank must call this: the first large bucket makes the process groups of the nodes.
    """
    size = like.nbytes
    pays = sum(shape.rows) * size > _FLAT_BYTES
    if pays and shape.world is not None and (groups := node_groups(shape.world)):
        return two_levels(like, shape, wire, groups)
    if row_length and size <= _CARRIES_ROWS_BYTES:
        return AllGatherExchange(like, row_length, shape, wire, among)
    if len(shape.rows) == 2 or size <= _SMALL_BYTES:
        return AllGatherExchange(like, 0, shape, wire, among)
    return AllToAllExchange(like, shape, wire, among)


def two_levels(
    like: Tensor, shape: TreeShape, wire: torch.device, groups: NodeGroups
) -> TwoLevelExchange:
    """Return the exchange within nodes and then between them."""
    of_node = NodeShape.of(shape, groups.per_node)
    nodes = of_node.between
    part = torch.empty(slice_length(like, groups.per_node), dtype=like.dtype, device=wire)
    between: Exchange
    is_small = sum(nodes.rows) * part.nbytes <= _SMALL_SLICES_BYTES
    if is_small or (len(nodes.rows) == 2 and max(nodes.rows) == 1):
        between = AllGatherExchange(part, 0, nodes, wire, groups.between)
    else:
        between = AllToAllExchange(part, nodes, wire, groups.between)
    return TwoLevelExchange(like, of_node, wire, groups, between)


# An all-reduce of a bucket in the backend's order, with as few bytes as `compression` says.


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class AllReduceExchange:
    """Adds a bucket over all ranks, rounded to fewer bits if asked."""

    def __init__(self, wire: torch.device, compression: str) -> None:
        self._wire, self._dtype = wire, _DTYPES.get(compression)

    def start(self, sums: list[Tensor], lane_rows: list[Tensor]) -> None:
        """Send this rank's sum."""
        assert not lane_rows
        self._sent = sums[0].to(self._wire, self._dtype or sums[0].dtype)
        self._work = dist.all_reduce(self._sent, async_op=True)

    def advance(self, total: Tensor) -> bool:
        """Wait for the sum."""
        finish(self._work)
        total.copy_(self._sent)
        return True


class PowerSgdExchange:
    """Adds a bucket as products of low-rank matrices, by torch's own PowerSGD."""

    def __init__(self, parameters: list[Tensor], ranks: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._hook = powerSGD_hook.powerSGD_hook
        self._state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
        self._parameters, self._ranks = parameters, ranks

    def start(self, sums: list[Tensor], lane_rows: list[Tensor]) -> None:
        """Send this rank's sum. The hook returns a mean over ranks."""
        assert not lane_rows
        bucket: Any = _WholeBucket(sums[0], self._parameters)
        self._done = self._hook(self._state, bucket)

    def advance(self, total: Tensor) -> bool:
        """Wait for the sum."""
        torch.mul(self._done.wait(), self._ranks, out=total)
        return True


class _WholeBucket:
    """All gradients as one bucket, with the interface of DDP's GradBucket."""

    def __init__(self, flat: Tensor, parameters: list[Tensor]) -> None:
        self._flat, self._parameters = flat, parameters

    def index(self) -> int:
        """Return the bucket's number."""
        return 0

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return True

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        """Replace the flat tensor."""
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, without gaps: channels-last weights have columns in another order."""
        sizes = [value.numel() for value in self._parameters]
        pairs = zip(torch.split(self._flat, sizes), self._parameters, strict=True)
        return [piece.view(value.shape) for piece, value in pairs]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of their gradients."""
        return self._parameters
