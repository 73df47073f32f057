"""Where the ranks of one world size run: on this machine, or on as many nodes of the allocation as they need."""

from __future__ import annotations

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
    """Return the settings under which a training can be measured: it goes on from nothing, leaves nothing, tells nobody."""
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
    words: tuple[str, ...],
    settings: Mapping[str, object],
    allocation: Allocation | None,
) -> Failure | None:
    """Run so many ranks to their end; return why they ended, if not because they were done."""
    if allocation is None or allocation.here:
        return launch(LaunchSpec(target, ranks, words, settings))
    nodes = nodes_for(ranks, allocation)
    some = replace(allocation, nodes=allocation.nodes[:nodes])
    with Path(os.devnull).open(
        "w", encoding="utf-8"
    ) as nowhere:  # what ranks say is not for our own output
        return launch_on(
            some, LaunchSpec(target, ranks // nodes, words, settings), nowhere, StopSignals()
        )


def nodes_for(ranks: int, allocation: Allocation) -> int:
    """Return on how many nodes they run: as few as hold them.

    >>> [nodes_for(ranks, Allocation(("a", "b", "c", "d"), 4, here=False)) for ranks in (1, 4, 8, 16)]
    [1, 1, 2, 4]
    """
    nodes = -(-ranks // allocation.ranks_per_node)
    if nodes > len(allocation.nodes):
        most = len(allocation.nodes) * allocation.ranks_per_node
        raise ConfigError(
            f"{ranks} ranks do not fit on this allocation: {len(allocation.nodes)} nodes of {allocation.ranks_per_node}",
            fix=f"ask Slurm for more, or give --worlds of at most {most}",
        )
    if ranks % nodes:
        raise ConfigError(
            f"{ranks} ranks cannot be spread evenly over {nodes} nodes",
            fix=f"give --worlds that fill whole nodes: multiples of {allocation.ranks_per_node}",
        )
    return nodes
