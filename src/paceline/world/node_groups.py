"""The process groups of an exchange in two levels: the ranks of one node, and one rank of each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from paceline.world.collectives import all_gather_rows, wire_device
from paceline.world.world import World

Place = tuple[int, int, int]
"""Node, local rank and local size of a rank."""


@dataclass(frozen=True, eq=False)
class NodeGroups:
    """The two process groups of this rank."""

    per_node: int
    """Ranks of each node."""
    within: ProcessGroup
    """All ranks of this node."""
    between: ProcessGroup
    """The ranks of all nodes that have the local rank of this one."""


_GROUPS: dict[ProcessGroup, NodeGroups | None] = {}
"""By the process group of all ranks: the groups are made once per run."""


def node_groups(world: World) -> NodeGroups | None:
    """Return the groups of this rank; None where the nodes do not allow two levels. Every rank must call this."""
    if world.nodes == 1:
        return None
    everyone = dist.group.WORLD
    assert everyone is not None
    if everyone not in _GROUPS:
        _GROUPS[everyone] = _make_groups(world, everyone)
    return _GROUPS[everyone]


def ranks_per_node(places: Sequence[Place]) -> int:
    """Return how many ranks each node has; 0 if nodes differ, have one rank, or do not have consecutive ranks.

    >>> ranks_per_node([(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)])
    2
    >>> cyclic, uneven = [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)], [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    >>> ranks_per_node(cyclic), ranks_per_node(uneven), ranks_per_node([(0, 0, 1), (1, 0, 1)])
    (0, 0, 0)
    """
    ranks, per_node = len(places), places[0][2]
    if not 1 < per_node < ranks or ranks % per_node:
        return 0
    consecutive = [(*divmod(rank, per_node), per_node) for rank in range(ranks)]
    return per_node if list(places) == consecutive else 0


def _make_groups(world: World, everyone: ProcessGroup) -> NodeGroups | None:
    # A rank knows only its own place, and launchers differ: the ranks must agree before they make groups.
    place = torch.tensor([world.node, world.local_rank, world.local_size])
    places = [(row[0], row[1], row[2]) for row in all_gather_rows(world, place).tolist()]
    per_node = ranks_per_node(places)
    if not per_node:
        return None
    first = world.rank - world.local_rank
    timeout = everyone._get_backend(wire_device(world)).options._timeout  # noqa: SLF001 - no public way
    groups = {}
    for start in range(0, world.size, per_node):
        ranks = range(start, start + per_node)
        name = f"node {start // per_node}"
        groups[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
    for local_rank in range(per_node):
        ranks = range(local_rank, world.size, per_node)
        name = f"local rank {local_rank} of all nodes"
        groups[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
    within = groups[range(first, first + per_node)]
    between = groups[range(world.local_rank, world.size, per_node)]
    return NodeGroups(per_node, within, between)
