"""The identity of this process, from the variables of its launcher. Pure: one function per launcher."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline import handover
from paceline.errors import EnvironmentUnfit
from paceline.world.address import split_address
from paceline.world.hostlist import expand_hostlist, tasks_on_node
from paceline.world.job import Env, deadline_of, incarnation_of, is_restart, launch_name
from paceline.world.world import (
    FileRendezvous,
    Launcher,
    PublishedRendezvous,
    Rendezvous,
    TcpRendezvous,
    World,
)


def detect_world(env: Env, parent: int = 0) -> World:
    """Return the world of this process.

    `parent`, the parent's process id, distinguishes mpirun jobs of one node.

    >>> detect_world({}).launcher
    'alone'
    >>> world = detect_world({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    ...     "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    >>> world.rank, world.size, world.launcher
    (3, 4, 'openmpi')
    """
    return replace(
        _checked(_find(env, parent)),
        deadline_s=deadline_of(env),
        interface=env.get(handover.INTERFACE, ""),
        incarnation=incarnation_of(env),
        launch=launch_name(env),
        is_restart=is_restart(env),
        most_size=_number(env, handover.MOST_RANKS, 0),
        progress_file=_path(env.get(handover.PROGRESS, "")),
        secret_file=_path(env.get(handover.SECRET_FILE, "")),
    )


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _find(env: Env, parent: int) -> World:
    for mark, read in _LAUNCHERS:
        if mark in env:
            return read(env, parent)
    return _from_torch_variables(env) if "RANK" in env or "WORLD_SIZE" in env else World()


def _from_paceline(env: Env, parent: int) -> World:
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    file = Path(env[handover.MEETING])
    if handover.ADDRESS not in env:
        world = World(rank, size, rank, size, 0, 1, "paceline", FileRendezvous(file))
        return replace(world, launcher_file=file)
    each = _number(env, "LOCAL_WORLD_SIZE")
    address, _, attempt = env[handover.ADDRESS].partition("/")
    host, port = split_address(address)
    rendezvous = TcpRendezvous(host, port, rank == 0, f"paceline-{attempt or 0}")
    node, nodes = rank // each, size // each
    world = World(rank, size, rank % each, each, node, nodes, "paceline", rendezvous)
    return replace(world, launcher_file=file)


def _from_torchrun(env: Env, parent: int) -> World:
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _from_torch_variables(
        env, prefix=f"paceline-{restart}", agent=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def _from_torch_variables(env: Env, prefix: str = "paceline", *, agent: bool = False) -> World:
    """Read the variables of torchrun, or of a person who exported them by hand for env://."""
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    local_rank = _number(env, "LOCAL_RANK", rank % local_size)
    rendezvous = (
        TcpRendezvous(
            _text(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"), rank == 0 and not agent, prefix
        )
        if size > 1
        else None
    )
    node = _number(env, "GROUP_RANK", rank // local_size)
    nodes = _number(env, "GROUP_WORLD_SIZE", _ceil(size, local_size))
    return World(rank, size, local_rank, local_size, node, nodes, "torchrun", rendezvous)


def _from_slurm(env: Env, parent: int) -> World:
    """Read a task of `srun`. A batch shell has SLURM_PROCID too, so a variable of the step identifies it."""
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    nodes, node = _number(env, "SLURM_STEP_NUM_NODES", 1), _number(env, "SLURM_NODEID", 0)
    local_size = tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(_ceil(size, nodes))), node)
    names = [
        _number(env, "SLURM_JOB_ID"),
        _number(env, "SLURM_STEP_ID"),
        _number(env, "SLURM_RESTART_COUNT", 0),
    ]
    # A new controller counts its jobs from 1 again; the port of srun differs.
    if "SLURM_STEP_LAUNCHER_PORT" in env:
        names.append(_number(env, "SLURM_STEP_LAUNCHER_PORT"))
    key = "-".join(["slurm", *map(str, names)])
    rendezvous = _rendezvous(
        env, key, size, nodes, lambda: _rendezvous_of_nodes(env, key, node, serve=rank == 0)
    )
    return World(
        rank, size, _number(env, "SLURM_LOCALID"), local_size, node, nodes, "slurm", rendezvous
    )


def _rendezvous_of_nodes(
    env: Env, key: str, node: int, *, serve: bool
) -> TcpRendezvous | PublishedRendezvous:
    """Return the rendezvous of a step: at MASTER_PORT if it is set, else at an address that rank 0 publishes."""
    if handover.OWN_MASTER in env:
        env = {name: value for name, value in env.items() if name not in _MASTER}
    given, suffix = env.get("MASTER_ADDR", ""), env.get(handover.HOST_SUFFIX, "")
    nodes = (
        []
        if given
        else [name + suffix for name in expand_hostlist(_text(env, "SLURM_STEP_NODELIST"))]
    )
    if "MASTER_PORT" in env:
        return TcpRendezvous(given or nodes[0], _number(env, "MASTER_PORT"), serve, key)
    own = (
        env["SLURMD_NODENAME"] + suffix
        if "SLURMD_NODENAME" in env
        else (nodes[node : node + 1] or [""])[0]
    )
    return PublishedRendezvous(
        key, given or own, tuple(name for name in nodes if name != own), serve
    )


_MASTER = {"MASTER_ADDR", "MASTER_PORT"}


def _from_openmpi(env: Env, parent: int) -> World:
    rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    local_rank = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _from_mpi(env, parent, rank, size, local_rank, local_size, "openmpi")


def _from_pmi(env: Env, parent: int) -> World:
    rank, size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    local_rank = _number(env, "MPI_LOCALRANKID", rank)
    local_size = _number(env, "MPI_LOCALNRANKS", size)
    return _from_mpi(env, parent, rank, size, local_rank, local_size, "pmi")


def _from_mpi(
    env: Env,
    parent: int,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    launcher: Launcher,
) -> World:
    nodes = _ceil(size, local_size)
    key = f"mpi-{parent}"
    rendezvous = _rendezvous(
        env, key, size, nodes, lambda: _rendezvous_of_mpi(env, serve=rank == 0)
    )
    return World(
        rank, size, local_rank, local_size, rank // local_size, nodes, launcher, rendezvous
    )


def _rendezvous_of_mpi(env: Env, *, serve: bool) -> TcpRendezvous | PublishedRendezvous:
    job = next((env[name] for name in _MPI_JOB if env.get(name)), "")
    key = "mpi-" + re.sub(r"[^\w-]", "_", job)
    if "MASTER_ADDR" in env or "MASTER_PORT" in env or not job:
        return TcpRendezvous(_text(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"), serve, key)
    return PublishedRendezvous(key, "", (), serve)


# The name of an mpirun job, equal on all its nodes: of Open MPI, then of Hydra.
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")

# The first variable found wins: a launcher inside another (mpirun or torchrun in a Slurm job) comes first.
_LAUNCHERS: list[tuple[str, Callable[[Env, int], World]]] = [
    (handover.MEETING, _from_paceline),
    ("TORCHELASTIC_RUN_ID", _from_torchrun),
    ("OMPI_COMM_WORLD_RANK", _from_openmpi),
    ("SLURM_STEP_NUM_TASKS", _from_slurm),
    ("PMI_RANK", _from_pmi),
]


def _rendezvous(
    env: Env,
    key: str,
    size: int,
    nodes: int,
    of_nodes: Callable[[], TcpRendezvous | PublishedRendezvous],
) -> Rendezvous | None:
    """Return the rendezvous: none for one rank, a file on one node, TCP between nodes."""
    if size == 1:
        return None
    if nodes > 1:
        return of_nodes()
    return FileRendezvous(Path(env.get("TMPDIR", "/tmp")) / f"paceline-{key}" / "meeting")  # noqa: S108 - claimed as private before use


def _number(env: Env, name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    text = _text(env, name)
    if not text.isdecimal():
        raise EnvironmentUnfit(
            f"the variable {name}={text!r} is not a number",
            fix=f"unset {name}, or start with `paceline run`",
        )
    return int(text)


def _text(env: Env, name: str) -> str:
    if not env.get(name):
        raise EnvironmentUnfit(
            f"this process is one of several ranks, but {name} is not set",
            fix=f"start with `paceline run` or `torchrun`, which set it; with mpirun on several nodes export {name} yourself",
        )
    return env[name]


def _ceil(amount: int, per: int) -> int:
    return -(-amount // max(1, per))


def _checked(world: World) -> World:
    if not 0 <= world.rank < world.size:
        raise EnvironmentUnfit(
            f"rank {world.rank} is not in a world of {world.size} ranks",
            fix="do not export RANK or WORLD_SIZE by hand; start with `paceline run`, `torchrun`, `srun` or `mpirun`",
        )
    return world
