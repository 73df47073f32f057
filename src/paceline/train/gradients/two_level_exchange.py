"""How one bucket is added over several nodes: first within each node, then between the nodes, along the same tree.

Each rank collects its slice of the sums of its node (all-to-all within the node) and adds what forms whole subtrees of
the lanes of the node. The ranks that hold the same slice on all nodes add the remaining sums. Then each node collects the
finished slices (all-gather within the node). Additions and their order are those of the tree, so the bits are those of
one rank. Gradients cross the network already added, so a node sends about as many bytes as one rank would alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from paceline.scale.tree import additions_to, whole_subtrees
from paceline.train.gradients.bucket_exchange import Exchange, TreeShape
from paceline.world.collectives import exchange, finish, gather
from paceline.world.node_groups import NodeGroups


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

    def start(self, sums: list[Tensor], notes: list[Tensor]) -> None:
        """Send every rank of the node its slice of this rank's subtree sums."""
        assert not notes
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
