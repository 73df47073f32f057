"""Many ranks in one process: exchanges advance in turn over simulated wires, and every message is counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paceline.exact import exchange
from paceline.exact.exchange import Exchange, TreeShape
from paceline.scale.batch import share
from paceline.world.node_groups import NodeGroups


@dataclass
class Link:
    """What one rank has sent to another."""

    messages: int = 0
    size_bytes: int = 0


@dataclass
class Group:
    """A process group as one of its ranks has it."""

    wires: Wires
    ranks: range
    rank: int
    calls: int = 0


class Wires:
    """The messages between all ranks: an all-to-all sends directly, an all-gather around a ring, as gloo does."""

    def __init__(self) -> None:
        self.links: dict[tuple[int, int], Link] = defaultdict(Link)
        self._posted: dict[tuple[range, int], dict[int, Any]] = defaultdict(dict)

    def between_nodes(self, per_node: int) -> Link:
        """Return what the node that sends most has sent to other nodes: its messages and its bytes."""
        nodes: dict[int, Link] = defaultdict(Link)
        for (source, target), link in self.links.items():
            if source // per_node != target // per_node:
                nodes[source // per_node].messages += link.messages
                nodes[source // per_node].size_bytes += link.size_bytes
        most = nodes.values()
        return Link(max(link.messages for link in most), max(link.size_bytes for link in most))

    def post(self, group: Group, content: Any) -> dict[int, Any]:
        """Keep what a rank sends in its next collective; return what all ranks of the group send in it."""
        group.calls += 1
        posted = self._posted[group.ranks, group.calls]
        posted[group.rank] = content
        return posted

    def count(self, source: int, target: int, messages: int, size_bytes: int) -> None:
        """Count messages of one rank to another; a rank sends itself nothing, and empty pieces are not sent."""
        if source != target and size_bytes:
            self.links[source, target].messages += messages
            self.links[source, target].size_bytes += size_bytes


@dataclass
class Delivery:
    """A collective that completes when it is waited for."""

    received: Tensor
    pieces: Callable[[], list[Tensor]]

    def wait(self) -> None:
        """Receive: all ranks have started the collective by now."""
        self.received.copy_(torch.cat(self.pieces()))


def _exchange(
    received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], group: Group
) -> Delivery:
    pieces = torch.split(sent.clone(), sent_sizes)
    for target, piece in zip(group.ranks, pieces, strict=True):
        group.wires.count(group.rank, target, 1, piece.nbytes)
    posted, own = group.wires.post(group, pieces), group.ranks.index(group.rank)
    return Delivery(received, lambda: [posted[rank][own] for rank in group.ranks])


def _gather(received: Tensor, sent: Tensor, group: Group) -> Delivery:
    others = len(group.ranks) - 1
    neighbour = group.ranks[(group.ranks.index(group.rank) + 1) % len(group.ranks)]
    group.wires.count(group.rank, neighbour, others, others * sent.nbytes)
    posted = group.wires.post(group, sent.clone())
    return Delivery(received, lambda: [posted[rank] for rank in group.ranks])


@contextmanager
def simulated_wires() -> Iterator[Wires]:
    """Replace the network of the exchanges."""
    with (
        patch.object(exchange, "exchange", _exchange),
        patch.object(exchange, "gather", _gather),
    ):
        yield Wires()


def shape_of(lanes: int, rank: int, ranks: int) -> TreeShape:
    """Return the shape of a rank in a world without processes."""
    return TreeShape.over([share(lanes, other, ranks) for other in range(ranks)], lanes, rank)


def everyone(wires: Wires, rank: int, ranks: int) -> Any:
    """Return the process group of all ranks."""
    return Group(wires, range(ranks), rank)


def groups_of(wires: Wires, rank: int, nodes: int, per_node: int) -> NodeGroups:
    """Return the process groups of a rank."""
    first, local_rank = rank - rank % per_node, rank % per_node
    within: Any = Group(wires, range(first, first + per_node), rank)
    between: Any = Group(wires, range(local_rank, nodes * per_node, per_node), rank)
    return NodeGroups(per_node, within, between)


def totals(
    exchanges: list[Exchange], sums: list[list[Tensor]], row_length: int = 0
) -> list[Tensor]:
    """Run the exchanges of all ranks to their end; return the total that each rank has. Those that can, carry empty rows."""
    found = [torch.full_like(rows[0], float("nan")) for rows in sums]
    for one, rows in zip(exchanges, sums, strict=True):
        carries_rows = getattr(one, "carries_rows", False)
        of_lanes = [torch.zeros(row_length, dtype=torch.float64) for _ in rows]
        one.start(rows, of_lanes if carries_rows else [])
    done = [False] * len(exchanges)
    while not all(done):
        done = [one.advance(total) for one, total in zip(exchanges, found, strict=True)]
    return found
