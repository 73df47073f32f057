"""The collectives of `paceline bench`, on numbers that identify their rank, message and position.

Rank r sends, as message i, a piece of one long sawtooth of whole numbers that begins at an offset computed from (r, i).
A missing or repeated rank, a piece from a wrong offset, or an earlier message therefore give other numbers, and sums
are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.exact.exchange import TreeShape, choose_exchange
from paceline.measure.bench_plan import ELEMENT_BYTES
from paceline.world.collectives import exchange, gather
from paceline.world.world import World

_PERIOD = 8179  # a prime, so that no piece has this length
MOST_RANKS = 2**24 // _PERIOD
"""The sum over more ranks would not be exact in float32."""

_GENERATOR = 2  # of the multiplicative group modulo the period
_OF_RANK, _OF_TURN = 17, 61


def offset_of(rank: int, turn: int) -> int:
    """Return where in the sawtooth a rank's message begins: not a pattern that a wrong piece could follow.

    >>> len({offset_of(rank, 3) for rank in range(2000)})
    2000
    """
    return pow(_GENERATOR, _OF_RANK * rank + _OF_TURN * turn + 1, _PERIOD)


class Sawtooth:
    """The numbers of all messages, and their sums over all ranks."""

    def __init__(self, elements: int, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._tooth = torch.arange(_PERIOD, dtype=torch.float32, device=device)
        self._long = self._tooth.repeat(_teeth(elements) + 1)

    def of(self, rank: int, turn: int, elements: int, skip: int = 0) -> Tensor:
        """Return the message of a rank in a turn, without its first `skip` numbers."""
        begin = (offset_of(rank, turn) + skip) % _PERIOD
        return self._long[begin : begin + elements]

    def sum_of_all(self, turn: int, elements: int, skip: int = 0) -> Tensor:
        """Return the sum of all ranks' messages in a turn."""
        total = torch.zeros_like(self._tooth)
        for rank in range(self._ranks):
            total += self.of(rank, turn, _PERIOD, skip)
        return total.repeat(_teeth(elements))[:elements]


def _teeth(elements: int) -> int:
    return -(-elements // _PERIOD) + 1


RunOperation = Callable[[Tensor, Tensor], None]
"""run(sent, received): one message, complete on return or, on a GPU, in the order of the stream."""


@dataclass(frozen=True)
class Operation:
    """One operation on messages of one size."""

    name: str
    size_bytes: int
    """As nccl-tests defines it: what one rank has at the end or, for reduce-scatter, at the start."""
    sent: int
    """Numbers that each rank contributes."""
    received: int
    """Numbers that each rank receives."""
    run: RunOperation
    expected: Callable[[Sawtooth, int], Tensor]
    """What this rank must receive in a turn."""
    messages: int = 1
    """Consecutive messages of one run."""
    takes_part: bool = True
    """Whether this rank sends or receives."""
    in_place: bool = False
    """Whether the receive buffer must contain the message beforehand."""
    on_wire: bool = True
    """Whether its tensors must be on a device that the backend can send from."""


def make_operation(name: str, size_bytes: int, world: World, wire: torch.device) -> Operation:
    """Return an operation for messages of about this size, with the same number of elements for every rank."""
    numbers = max(1, size_bytes // ELEMENT_BYTES)
    if name in _WHOLE:
        return _WHOLE[name](name, numbers, world, wire)
    piece = max(1, numbers // world.size)
    return _BY_PIECES[name](name, piece, world)


def _all_reduce(name: str, numbers: int, world: World, wire: torch.device) -> Operation:
    def run(sent: Tensor, received: Tensor) -> None:
        dist.all_reduce(received)

    return replace(_whole(name, numbers, run), in_place=True)


def _tree(name: str, numbers: int, world: World, wire: torch.device) -> Operation:
    like = torch.empty(numbers, device=world.device)
    tree = choose_exchange(like, 0, TreeShape.of(world.size, world), wire)

    def run(sent: Tensor, received: Tensor) -> None:
        tree.start([sent], [])
        while not tree.advance(received):
            pass

    return replace(_whole(name, numbers, run), on_wire=False)


def _whole(name: str, numbers: int, run: RunOperation) -> Operation:
    return Operation(
        name,
        numbers * ELEMENT_BYTES,
        numbers,
        numbers,
        run,
        lambda sawtooth, turn: sawtooth.sum_of_all(turn, numbers),
    )


def _pair(name: str, numbers: int, world: World, wire: torch.device) -> Operation:
    last = world.size - 1
    peer = last - world.rank

    def run(sent: Tensor, received: Tensor) -> None:
        if world.rank == 0:
            dist.send(sent, peer)
            dist.recv(received, peer)
        else:
            dist.recv(received, peer)
            dist.send(sent, peer)

    def expected(sawtooth: Sawtooth, turn: int) -> Tensor:
        return sawtooth.of(peer, turn, numbers)

    takes_part = world.size > 1 and world.rank in {0, last}
    return Operation(
        name,
        numbers * ELEMENT_BYTES,
        numbers,
        numbers,
        run,
        expected,
        messages=2,
        takes_part=takes_part,
    )


def _all_gather(name: str, piece: int, world: World) -> Operation:
    def run(sent: Tensor, received: Tensor) -> None:
        gather(received, sent).wait()

    def expected(sawtooth: Sawtooth, turn: int) -> Tensor:
        return torch.cat([sawtooth.of(rank, turn, piece) for rank in range(world.size)])

    return Operation(
        name, piece * world.size * ELEMENT_BYTES, piece, piece * world.size, run, expected
    )


def _reduce_scatter(name: str, piece: int, world: World) -> Operation:
    def run(sent: Tensor, received: Tensor) -> None:
        dist.group.WORLD._reduce_scatter_base(received, sent).wait()  # type: ignore[union-attr,call-arg]  # noqa: SLF001 - as `gather`

    def expected(sawtooth: Sawtooth, turn: int) -> Tensor:
        return sawtooth.sum_of_all(turn, piece, skip=world.rank * piece)

    return Operation(
        name, piece * world.size * ELEMENT_BYTES, piece * world.size, piece, run, expected
    )


def _all_to_all(name: str, piece: int, world: World) -> Operation:
    pieces = [piece] * world.size

    def run(sent: Tensor, received: Tensor) -> None:
        exchange(received, sent, pieces, pieces).wait()

    def expected(sawtooth: Sawtooth, turn: int) -> Tensor:
        return torch.cat(
            [sawtooth.of(rank, turn, piece, skip=world.rank * piece) for rank in range(world.size)]
        )

    return Operation(
        name,
        piece * world.size * ELEMENT_BYTES,
        piece * world.size,
        piece * world.size,
        run,
        expected,
    )


_WHOLE = {"all-reduce": _all_reduce, "tree": _tree, "pair": _pair}
_BY_PIECES = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
}
