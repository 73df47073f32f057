"""Which exchange adds a bucket: by its size, and by the number of ranks and nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from paceline.train.gradients.bucket_exchange import (
    AllGatherExchange,
    AllToAllExchange,
    Exchange,
    TreeShape,
)
from paceline.train.gradients.two_level_exchange import NodeShape, TwoLevelExchange, slice_length
from paceline.world.node_groups import NodeGroups, node_groups

_SMALL_BYTES = 1 << 16  # below this size a second message costs more than the bytes it saves
# Above this size a message for the notes alone costs less than copying the bucket.
_CARRIES_NOTES_BYTES = 1 << 20
# Two levels cost two or three messages more within the node. That pays once the sums of all ranks exceed this size.
_FLAT_BYTES = 1 << 20
_SMALL_SLICES_BYTES = 1 << 18  # slices of all nodes together


def choose_exchange(
    like: Tensor,
    note_length: int,
    shape: TreeShape,
    wire: torch.device,
    among: ProcessGroup | None = None,
) -> Exchange:
    """Return the cheapest exchange for a bucket of this size in this world; small buckets carry the notes.

    Every rank must call this: the first large bucket makes the process groups of the nodes.
    """
    size = like.nbytes
    pays = sum(shape.rows) * size > _FLAT_BYTES
    if pays and shape.world is not None and (groups := node_groups(shape.world)):
        return two_levels(like, shape, wire, groups)
    if note_length and size <= _CARRIES_NOTES_BYTES:
        return AllGatherExchange(like, note_length, shape, wire, among)
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
