"""What is measured: collectives on numbers of which every one says whose it is, and from where.

Rank r sends, in its i-th message, a piece of one long saw of whole numbers that begins at a place found from (r, i). So a
rank that was left out or came twice, a slice from another place, or a message of another turn give other
numbers; and sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.measure.bench_plan import ELEMENT_BYTES
from paceline.train.bucket_exchange import TreeShape, choose_exchange
from paceline.world.collectives import exchange, gather
from paceline.world.world import World

_PERIOD = 8179  # a prime, so no slice is as long
MOST_RANKS = 2**24 // _PERIOD
"""So many add up to what float32 holds exactly."""

_GENERATOR = 2  # of all numbers below the period
_OF_RANK, _OF_TURN = 17, 61


def offset_of(rank: int, turn: int) -> int:
    """Return where in the saw a rank's message begins; no rule that a wrong slice could follow by chance.

    >>> len({offset_of(rank, 3) for rank in range(2000)})
    2000
    """
    return pow(_GENERATOR, _OF_RANK * rank + _OF_TURN * turn + 1, _PERIOD)


class Sawtooth:
    """The numbers that messages are cut from, and their sums over all ranks."""

    def __init__(self, elements: int, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._one = torch.arange(_PERIOD, dtype=torch.float32, device=device)
        self._long = self._one.repeat(_teeth(elements) + 1)

    def of(self, rank: int, turn: int, elements: int, skip: int = 0) -> Tensor:
        """Return what a rank sends in a turn, or the part of it after the first `skip` numbers."""
        begin = (offset_of(rank, turn) + skip) % _PERIOD
        return self._long[begin : begin + elements]

    def sum_of_all(self, turn: int, elements: int, skip: int = 0) -> Tensor:
        """Return the sum over all ranks of what they send in a turn."""
        total = torch.zeros_like(self._one)
        for rank in range(self._ranks):
            total += self.of(rank, turn, _PERIOD, skip)
        return total.repeat(_teeth(elements))[:elements]


def _teeth(elements: int) -> int:
    return -(-elements // _PERIOD) + 1


RunOperation = Callable[[Tensor, Tensor], None]
"""run(sent, received): one whole message, done when it returns or, on a GPU, when its stream has come so far."""


@dataclass(frozen=True)
class Operation:
    """One operation on messages of one size."""

    name: str
    size_bytes: int
    """By the definition of nccl-tests: what one rank has in the end or, for slices of a sum, at the start."""
    sent: int
    """Numbers that each rank sends in."""
    received: int
    """Numbers that each rank gets."""
    run: RunOperation
    right: Callable[[Sawtooth, int], Tensor]
    """What this rank must get in a turn."""
    messages: int = 1
    """Messages, one after the other, that one run takes."""
    takes_part: bool = True
    """Whether this rank does anything in it."""
    in_place: bool = False
    """Whether what is received must hold what is sent beforehand."""
    on_wire: bool = True
    """Whether it takes only memory that the backend can send."""


def make_operation(name: str, size_bytes: int, world: World, wire: torch.device) -> Operation:
    """Return an operation for messages of about this size: whole numbers, as many for every rank."""
    numbers = max(1, size_bytes // ELEMENT_BYTES)
    if name in _WHOLE:
        return _WHOLE[name](name, numbers, world, wire)
    piece = max(1, numbers // world.size)
    return _SLICED[name](name, piece, world)


def _all_reduce(name: str, numbers: int, world: World, wire: torch.device) -> Operation:
    def run(sent: Tensor, received: Tensor) -> None:
        dist.all_reduce(received)

    return replace(_whole(name, numbers, run), in_place=True)


def _tree(name: str, numbers: int, world: World, wire: torch.device) -> Operation:
    like = torch.empty(numbers, device=world.device)
    way = choose_exchange(like, 0, TreeShape.of(world.size, world), wire)

    def run(sent: Tensor, received: Tensor) -> None:
        way.start([sent], [])
        while not way.advance(received):
            pass

    return replace(_whole(name, numbers, run), on_wire=False)


def _whole(name: str, numbers: int, run: RunOperation) -> Operation:
    return Operation(
        name,
        numbers * ELEMENT_BYTES,
        numbers,
        numbers,
        run,
        lambda saw, turn: saw.sum_of_all(turn, numbers),
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

    def right(saw: Sawtooth, turn: int) -> Tensor:
        return saw.of(peer, turn, numbers)

    plays = world.size > 1 and world.rank in {0, last}
    return Operation(
        name, numbers * ELEMENT_BYTES, numbers, numbers, run, right, messages=2, takes_part=plays
    )


def _all_gather(name: str, piece: int, world: World) -> Operation:
    def run(sent: Tensor, received: Tensor) -> None:
        gather(received, sent).wait()

    def right(saw: Sawtooth, turn: int) -> Tensor:
        return torch.cat([saw.of(rank, turn, piece) for rank in range(world.size)])

    return Operation(
        name, piece * world.size * ELEMENT_BYTES, piece, piece * world.size, run, right
    )


def _reduce_scatter(name: str, piece: int, world: World) -> Operation:
    def run(sent: Tensor, received: Tensor) -> None:
        dist.group.WORLD._reduce_scatter_base(received, sent).wait()  # type: ignore[union-attr,call-arg]  # noqa: SLF001 - as `gather`

    def right(saw: Sawtooth, turn: int) -> Tensor:
        return saw.sum_of_all(turn, piece, skip=world.rank * piece)

    return Operation(
        name, piece * world.size * ELEMENT_BYTES, piece * world.size, piece, run, right
    )


def _all_to_all(name: str, piece: int, world: World) -> Operation:
    pieces = [piece] * world.size

    def run(sent: Tensor, received: Tensor) -> None:
        exchange(received, sent, pieces, pieces).wait()

    def right(saw: Sawtooth, turn: int) -> Tensor:
        return torch.cat(
            [saw.of(rank, turn, piece, skip=world.rank * piece) for rank in range(world.size)]
        )

    return Operation(
        name, piece * world.size * ELEMENT_BYTES, piece * world.size, piece * world.size, run, right
    )


_WHOLE = {"all-reduce": _all_reduce, "tree": _tree, "pair": _pair}
_SLICED = {"all-gather": _all_gather, "reduce-scatter": _reduce_scatter, "all-to-all": _all_to_all}
