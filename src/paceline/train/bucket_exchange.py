"""How one bucket of subtree sums crosses the ranks and becomes the sum of all, in the order of the tree.

Two ways, with the same bits. A gather sends every sum to every rank: one message, and no more bytes than a
ring all-reduce between two ranks. Between more, large buckets go in slices: each rank collects one slice from
all, adds it, and sends the result back, which is as many bytes as a ring all-reduce for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from paceline.scale.batch import share
from paceline.scale.tree import additions, whole_subtrees
from paceline.world.collectives import exchange, finish, gather
from paceline.world.world import World

_SMALL_BYTES = 1 << 16  # below this a second message costs more than the bytes it saves
_CARRIES_NOTES_BYTES = (
    1 << 20
)  # above this a message for the notes alone costs less than a copy of the bucket


@dataclass(frozen=True)
class TreeShape:
    """Which subtree sums each rank brings, and the additions that are left."""

    rows: tuple[int, ...]
    additions: tuple[tuple[int, int], ...]
    rank: int

    @classmethod
    def of(cls, lanes: int, world: World) -> TreeShape:
        """Return the shape for this rank of this world."""
        return cls.over(
            [share(lanes, rank, world.size) for rank in range(world.size)], lanes, world.rank
        )

    @classmethod
    def over(cls, shares: Sequence[range], lanes: int, rank: int) -> TreeShape:
        """Return the shape for the one of this number among some that share the lanes like this."""
        nodes = [whole_subtrees(mine, lanes) for mine in shares]
        flat = [node for mine in nodes for node in mine]
        return cls(tuple(len(mine) for mine in nodes), tuple(additions(flat, lanes)), rank)

    def add_up(self, rows: list[Tensor], total: Tensor) -> None:
        """Add all rows along the tree into `total`; the rows are used up."""
        if not self.additions:
            total.copy_(rows[0])
            return
        for to, source in self.additions[:-1]:
            rows[to].add_(rows[source])
        to, source = self.additions[-1]
        torch.add(rows[to], rows[source], out=total)


class Exchange(Protocol):
    """One bucket on its way. All ranks start and advance their buckets in the same order."""

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send this rank's subtree sums and notes."""

    def advance(self, total: Tensor) -> bool:
        """Wait for the message under way and take the next stage; true once `total` holds the sum of all ranks."""


class AllGatherExchange:
    """Everybody gets everything, notes included, in one message."""

    def __init__(
        self,
        like: Tensor,
        note_length: int,
        shape: TreeShape,
        wire: torch.device,
        among: ProcessGroup | None = None,
    ) -> None:
        self._shape, self._among = shape, among
        self.carries_notes = note_length > 0
        most = max(shape.rows)
        row_bytes = like.numel() * like.element_size()
        self._send_as_it_is = most == 1 and not note_length and like.device == wire
        notes_at = -(-most * row_bytes // 8) * 8 if note_length else most * row_bytes
        size = notes_at + most * note_length * 8
        self._sent = torch.zeros(size, dtype=torch.uint8, device=wire)
        self._received = torch.empty(size * len(shape.rows), dtype=torch.uint8, device=wire)

        def views(message: Tensor, rows: int) -> tuple[list[Tensor], list[Tensor]]:
            sums = [
                message[row * row_bytes : (row + 1) * row_bytes].view(like.dtype)
                for row in range(rows)
            ]
            notes = (
                message[notes_at:].view(torch.float64).view(-1, note_length) if note_length else ()
            )
            return sums, list(notes[:rows])

        self._my_sums, self._my_notes = views(self._sent, shape.rows[shape.rank])
        messages = self._received.view(len(shape.rows), size)
        self._sums, self._notes = [], []
        for rank, rows in enumerate(shape.rows):
            sums, notes = views(messages[rank], rows)
            self._sums += sums
            self._notes += notes

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send this rank's subtree sums and notes to all."""
        if self._send_as_it_is:
            self._work = gather(self._received, sums[0].view(torch.uint8), self._among)
            return
        for place, value in zip(self._my_sums + self._my_notes, sums + notes, strict=True):
            place.copy_(value)
        self._work = gather(self._received, self._sent, self._among)

    def advance(self, total: Tensor) -> bool:
        """Add what came along the tree."""
        finish(self._work)
        if total.device == self._sums[0].device:
            self._shape.add_up(self._sums, total)
        else:
            self._shape.add_up(self._sums, self._sums[0])
            total.copy_(self._sums[0])
        return True

    def total_note(self) -> Tensor:
        """Return the sum of all notes, once the exchange is done."""
        total = torch.empty_like(self._notes[0])
        self._shape.add_up(self._notes, total)
        return total


class AllToAllExchange:
    """Each rank adds one slice for all: an all-to-all, the sum, an all-gather."""

    def __init__(
        self, like: Tensor, shape: TreeShape, wire: torch.device, among: ProcessGroup | None = None
    ) -> None:
        size = len(shape.rows)
        self._shape, self._among = shape, among
        self._slice = -(-like.numel() // size)
        self._sizes = [
            max(0, min(self._slice, like.numel() - rank * self._slice)) for rank in range(size)
        ]
        mine, my_rows = self._sizes[shape.rank], shape.rows[shape.rank]

        def empty(elements: int) -> Tensor:
            return torch.empty(elements, dtype=like.dtype, device=wire)

        self._sent = empty(my_rows * like.numel())
        self._places = torch.split(
            self._sent, [size for size in self._sizes for _ in range(my_rows)]
        )
        self._received = empty(sum(shape.rows) * mine)
        self._received_sizes = [rows * mine for rows in shape.rows]
        self._rows = list(self._received.view(sum(shape.rows), mine))
        self._result = empty(self._slice).zero_()
        self._gathered = empty(self._slice * size)
        self._gathering = False

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send every rank its slice of this rank's subtree sums."""
        assert not notes
        pieces = zip(*(torch.split(value, self._sizes) for value in sums), strict=True)
        for place, piece in zip(
            self._places, (piece for slices in pieces for piece in slices), strict=True
        ):
            place.copy_(piece)
        sent_sizes = [size * len(sums) for size in self._sizes]
        self._work = exchange(
            self._received, self._sent, self._received_sizes, sent_sizes, self._among
        )
        self._gathering = False

    def advance(self, total: Tensor) -> bool:
        """Add this rank's slice and send it back; then collect the slices of all."""
        finish(self._work)
        if self._gathering:
            total.copy_(self._gathered[: total.numel()])
            return True
        self._shape.add_up(self._rows, self._result[: self._rows[0].numel()])
        self._work = gather(self._gathered, self._result, self._among)
        self._gathering = True
        return False


def choose_exchange(
    like: Tensor,
    note_length: int,
    shape: TreeShape,
    wire: torch.device,
    among: ProcessGroup | None = None,
) -> Exchange:
    """Return the cheapest way for a bucket of this size in this world; notes ride along where the bucket is small."""
    size = like.numel() * like.element_size()
    if note_length and size <= _CARRIES_NOTES_BYTES:
        return AllGatherExchange(like, note_length, shape, wire, among)
    if len(shape.rows) == 2 or size <= _SMALL_BYTES:
        return AllGatherExchange(like, 0, shape, wire, among)
    return AllToAllExchange(like, shape, wire, among)
