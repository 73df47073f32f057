"""The variables of torchrun for a rank that srun started, so that `init_process_group` of any script works."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from paceline import handover
from paceline.errors import EnvironmentUnfit
from paceline.world.hostlist import expand_hostlist
from paceline.world.world import World

_PORTS = range(20_000, 32_768)  # below the ephemeral ports
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT")


def torch_variables(world: World, env: Mapping[str, str]) -> dict[str, str]:
    """Return them for a task of a Slurm step; `paceline.Run` does not use their address.

    >>> found = torch_variables(World(3, 4, 1, 2, 1, 2), {"SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "n[1-2]"})
    >>> found["RANK"], found["LOCAL_RANK"], found["GROUP_RANK"], found["MASTER_ADDR"]
    ('3', '1', '1', 'n1')
    """
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(world.node),
        "GROUP_WORLD_SIZE": str(world.nodes),
        "MASTER_ADDR": _host(world, env),
        "MASTER_PORT": str(_port(env)),
        handover.OWN_MASTER: "1",
    }


def _host(world: World, env: Mapping[str, str]) -> str:
    if world.nodes == 1:
        return "127.0.0.1"
    nodes = expand_hostlist(env.get("SLURM_STEP_NODELIST", ""))
    if not nodes:
        raise EnvironmentUnfit(
            f"this process is one of {world.size} ranks, but SLURM_STEP_NODELIST is not set",
            fix="start it with srun",
        )
    return nodes[0] + env.get(handover.HOST_SUFFIX, "")


def _port(env: Mapping[str, str]) -> int:
    """Return a port that all tasks of a step derive alike; no task can choose a free one for all."""
    step = "-".join(env.get(name, "") for name in _STEP)
    return _PORTS[zlib.crc32(step.encode()) % len(_PORTS)]
