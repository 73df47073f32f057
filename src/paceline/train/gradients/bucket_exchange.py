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
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from paceline.scale.batch import share
from paceline.scale.tree import additions, whole_subtrees
from paceline.world.collectives import exchange, finish, gather
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

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send this rank's subtree sums and notes."""

    def advance(self, total: Tensor) -> bool:
        """Wait for the current message and start the next stage; true once `total` holds the sum over all ranks."""


class AllGatherExchange:
    """Sends everything to every rank, notes included, in one message."""

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
        layout = _MessageLayout.of(like, note_length, max(shape.rows))
        self._sends_in_place = max(shape.rows) == 1 and not note_length and like.device == wire
        size, ranks = layout.size_bytes, len(shape.rows)
        self._sent = torch.zeros(size, dtype=torch.uint8, device=wire)
        self._received = torch.empty(size * ranks, dtype=torch.uint8, device=wire)
        self._my_sums, self._my_notes = layout.views(self._sent, shape.rows[shape.rank])
        self._sums: list[Tensor] = []
        self._notes: list[Tensor] = []
        for message, rows in zip(self._received.view(ranks, size), shape.rows, strict=True):
            sums, notes = layout.views(message, rows)
            self._sums += sums
            self._notes += notes

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send this rank's subtree sums and notes to all ranks."""
        if self._sends_in_place:
            self._work = gather(self._received, sums[0].view(torch.uint8), self._among)
            return
        for place, value in zip(self._my_sums + self._my_notes, sums + notes, strict=True):
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

    def total_note(self) -> Tensor:
        """Return the sum of all notes, once the exchange is complete."""
        total = torch.empty_like(self._notes[0])
        self._shape.add_up(self._notes, total)
        return total


@dataclass(frozen=True)
class _MessageLayout:
    """Where sums and notes lie in the message of one rank; all messages have the same size."""

    dtype: torch.dtype
    row_bytes: int
    note_length: int
    notes_at: int
    size_bytes: int

    @classmethod
    def of(cls, like: Tensor, note_length: int, max_rows: int) -> _MessageLayout:
        row_bytes = like.numel() * like.element_size()
        notes_at = max_rows * row_bytes
        if note_length:
            notes_at = -(-notes_at // 8) * 8  # notes are float64
        size_bytes = notes_at + max_rows * note_length * 8
        return cls(like.dtype, row_bytes, note_length, notes_at, size_bytes)

    def views(self, message: Tensor, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the sums and of the notes in a message."""
        sums = []
        for row in range(rows):
            begin = row * self.row_bytes
            sums.append(message[begin : begin + self.row_bytes].view(self.dtype))
        if not self.note_length:
            return sums, []
        notes = message[self.notes_at :].view(torch.float64).view(-1, self.note_length)
        return sums, list(notes[:rows])


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

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send every rank its part of this rank's subtree sums."""
        assert not notes
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


def sum_of_notes(notes: list[Tensor], shape: TreeShape, wire: torch.device) -> Tensor:
    """Return the sum of the notes of all ranks, sent in a message of their own. Every rank must call this."""
    nothing = torch.empty(0, device=wire)
    message = AllGatherExchange(nothing, len(notes[0]), shape, wire)
    message.start([nothing] * len(notes), notes)
    message.advance(nothing)
    return message.total_note()
