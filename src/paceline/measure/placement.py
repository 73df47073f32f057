"""Where the ranks of one world size run: on this machine, or on as few nodes of the allocation as hold them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.cluster.allocation import Allocation, launch_on
from paceline.errors import ConfigError
from paceline.launch.failure import Failure
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec, Program
from paceline.launch.supervisor import launch


def isolated_settings(home: Path) -> dict[str, object]:
    """Return settings for a measured training: it resumes nothing, keeps nothing and logs to no service."""
    return {
        "runs": str(home / "runs"),
        "checkpoint.every": "end",
        "checkpoint.to": "",
        "resume": "never",
        "stop_after": "",
        "log.to": "",
    }


def run_ranks(
    target: Program,
    ranks: int,
    arguments: tuple[str, ...],
    settings: Mapping[str, object],
    allocation: Allocation | None,
    most_ranks: int = 0,
) -> Failure | None:
    """Run a program on a number of ranks until it ends; return the failure, if any."""
    if allocation is None or allocation.is_local:
        return launch(LaunchSpec(target, ranks, arguments, settings, most_ranks=most_ranks))
    nodes = nodes_for(ranks, allocation)
    part = replace(allocation, nodes=allocation.nodes[:nodes])
    spec = LaunchSpec(target, ranks // nodes, arguments, settings, most_ranks=most_ranks)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:  # the output of the ranks
        return launch_on(part, spec, nowhere, StopSignals())


def nodes_for(ranks: int, allocation: Allocation) -> int:
    """Return the smallest number of nodes that holds the ranks.

    >>> [nodes_for(ranks, Allocation(("a", "b", "c", "d"), 4, is_local=False)) for ranks in (1, 4, 8, 16)]
    [1, 1, 2, 4]
    """
    per_node = allocation.ranks_per_node
    nodes = math.ceil(ranks / per_node)
    if nodes > len(allocation.nodes):
        most = len(allocation.nodes) * per_node
        raise ConfigError(
            f"{ranks} ranks do not fit on this allocation: {len(allocation.nodes)} nodes of {per_node}",
            fix=f"request more nodes from Slurm, or give --worlds of at most {most}",
        )
    if ranks % nodes:
        raise ConfigError(
            f"{ranks} ranks cannot be spread evenly over {nodes} nodes",
            fix=f"give --worlds that fill whole nodes: multiples of {per_node}",
        )
    return nodes
