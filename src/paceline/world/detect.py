"""Who this process is, from the variables of whatever started it. Pure: one function per launcher."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from paceline import handover
from paceline.errors import EnvironmentUnfit
from paceline.world.facts import FileMeeting, TcpMeeting, World
from paceline.world.hostlist import expand_hostlist

Env = Mapping[str, str]


def detect_world(env: Env, parent: int = 0) -> World:
    """Return who this process is. `parent` is the parent's process id, which tells mpirun jobs of one node apart.

    >>> detect_world({}).launcher
    'alone'
    >>> world = detect_world({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    ...     "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    >>> world.rank, world.size, world.launcher
    (3, 4, 'openmpi')
    """
    return replace(_checked(_find(env, parent)), deadline_s=_deadline(env))


def _find(env: Env, parent: int) -> World:
    for mark, read in _LAUNCHERS:
        if mark in env:
            return read(env, parent)
    return _from_torch_variables(env) if "RANK" in env or "WORLD_SIZE" in env else World()


def _deadline(env: Env) -> float:
    """Return the earliest end that anybody has told us of.

    >>> _deadline({"SLURM_JOB_END_TIME": "1790000000"}), _deadline({})
    (1790000000.0, inf)
    """
    names = (handover.DEADLINE, "SLURM_JOB_END_TIME")
    return min((float(env[name]) for name in names if env.get(name, "").replace(".", "").isdecimal()), default=math.inf)


def _from_paceline(env: Env, parent: int) -> World:
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    return World(rank, size, rank, size, launcher="paceline", meeting=FileMeeting(Path(env[handover.MEETING])))


def _from_torchrun(env: Env, parent: int) -> World:
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _from_torch_variables(
        env, prefix=f"paceline-{restart}", agent=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def _from_torch_variables(env: Env, prefix: str = "paceline", *, agent: bool = False) -> World:
    """Read what torchrun sets, or what a person exported by hand for env://."""
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    local_rank = _number(env, "LOCAL_RANK", rank % local_size)
    meeting = (
        TcpMeeting(_word(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"), rank == 0 and not agent, prefix)
        if size > 1
        else None
    )
    node = _number(env, "GROUP_RANK", rank // local_size)
    return World(rank, size, local_rank, local_size, node, _ceil(size, local_size), "torchrun", meeting)


def _from_slurm(env: Env, parent: int) -> World:
    """Read a task of `srun`. A batch shell has SLURM_PROCID too, so the mark is the step's own variable."""
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    nodes, node = _number(env, "SLURM_STEP_NUM_NODES", 1), _number(env, "SLURM_NODEID", 0)
    local_size = _slurm_tasks_here(env.get("SLURM_STEP_TASKS_PER_NODE", str(_ceil(size, nodes))), node)
    key = (
        f"slurm-{_number(env, 'SLURM_JOB_ID')}-{_number(env, 'SLURM_STEP_ID')}-{_number(env, 'SLURM_RESTART_COUNT', 0)}"
    )
    host = env.get("MASTER_ADDR") or expand_hostlist(env.get("SLURM_STEP_NODELIST", "localhost"))[0]
    port = _number(env, "MASTER_PORT", 20000 + _number(env, "SLURM_JOB_ID") % 10000)
    meeting = _meeting(env, key, size, nodes, lambda: TcpMeeting(host, port, rank == 0, key))
    return World(rank, size, _number(env, "SLURM_LOCALID"), local_size, node, nodes, "slurm", meeting)


def _from_openmpi(env: Env, parent: int) -> World:
    rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    local_rank, local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"), _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _from_mpi(env, parent, rank, size, local_rank, local_size, "openmpi")


def _from_pmi(env: Env, parent: int) -> World:
    rank, size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    local_rank, local_size = _number(env, "MPI_LOCALRANKID", rank), _number(env, "MPI_LOCALNRANKS", size)
    return _from_mpi(env, parent, rank, size, local_rank, local_size, "pmi")


def _from_mpi(env: Env, parent: int, rank: int, size: int, local_rank: int, local_size: int, launcher: str) -> World:
    nodes = _ceil(size, local_size)
    key = f"mpi-{parent}"
    meeting = _meeting(
        env,
        key,
        size,
        nodes,
        lambda: TcpMeeting(_word(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"), rank == 0, key),
    )
    return World(rank, size, local_rank, local_size, rank // local_size, nodes, launcher, meeting)  # type: ignore[arg-type]


# The first mark found wins: a launcher inside another (mpirun or torchrun in a Slurm job) is the nearer one.
_LAUNCHERS: list[tuple[str, Callable[[Env, int], World]]] = [
    (handover.MEETING, _from_paceline),
    ("TORCHELASTIC_RUN_ID", _from_torchrun),
    ("OMPI_COMM_WORLD_RANK", _from_openmpi),
    ("SLURM_STEP_NUM_TASKS", _from_slurm),
    ("PMI_RANK", _from_pmi),
]


def _meeting(
    env: Env, key: str, size: int, nodes: int, tcp: Callable[[], TcpMeeting]
) -> FileMeeting | TcpMeeting | None:
    """Choose where to meet: nobody alone, one node in a file, several over TCP."""
    if size == 1:
        return None
    if nodes > 1:
        return tcp()
    return FileMeeting(Path(env.get("TMPDIR", "/tmp")) / f"paceline-{key}" / "meeting")  # noqa: S108 - claimed as private before use


def _slurm_tasks_here(text: str, node: int) -> int:
    """Return the tasks of one node from Slurm's short form.

    >>> [_slurm_tasks_here("2(x2),1", node) for node in range(3)]
    [2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[node]


def _number(env: Env, name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    word = _word(env, name)
    if not word.isdecimal():
        raise EnvironmentUnfit(
            f"the variable {name}={word!r} is not a number", fix=f"unset {name}, or start with `paceline run`"
        )
    return int(word)


def _word(env: Env, name: str) -> str:
    if not env.get(name):
        raise EnvironmentUnfit(
            f"this process is one of several, but {name} is not set",
            fix=f"start with `paceline run` or `torchrun`, which set it; with mpirun over several nodes export {name} yourself",
        )
    return env[name]


def _ceil(amount: int, per: int) -> int:
    return -(-amount // max(1, per))


def _checked(world: World) -> World:
    if not 0 <= world.rank < world.size:
        raise EnvironmentUnfit(
            f"rank {world.rank} does not exist in a world of {world.size}",
            fix="do not export RANK or WORLD_SIZE by hand; start with `paceline run`, `torchrun`, `srun` or `mpirun`",
        )
    return world
