"""Who this process is, from the variables of whatever started it. Pure: one function per launcher."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from paceline import handover
from paceline.errors import EnvironmentUnfit
from paceline.world.address import split_address
from paceline.world.hostlist import expand_hostlist
from paceline.world.world import FileRendezvous, Meeting, PublishedRendezvous, TcpRendezvous, World

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
    return replace(
        _checked(_find(env, parent)),
        deadline_s=_deadline(env),
        interface=env.get(handover.INTERFACE, ""),
        incarnation=_incarnation(env),
        launch=_launch(env),
        is_restart=_is_restart(env),
        progress_file=_path(env.get(handover.PROGRESS, "")),
    )


def _launch(env: Env) -> str:
    """Return the name of the launch or job that this process is a start of.

    >>> _launch({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}), _launch({"PACELINE_LAUNCHER": "123"})
    ('17', '123')
    """
    return (
        _incarnation(env).rpartition(":")[0]
        or env.get(handover.LAUNCHER)
        or env.get("TORCHELASTIC_RUN_ID", "")
    )


def _is_restart(env: Env) -> bool:
    """Return whether an earlier start of it came before.

    >>> _is_restart({"SLURM_JOB_ID": "17"}), _again({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"})
    (False, True)
    """
    counts = (
        _incarnation(env).rpartition(":")[2],
        env.get(handover.ATTEMPT),
        env.get("TORCHELASTIC_RESTART_COUNT"),
    )
    return any(count not in {"", "0", None} for count in counts)


def _path(text: str) -> Path | None:
    return Path(text) if text else None


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
    return min(
        (float(env[name]) for name in names if env.get(name, "").replace(".", "").isdecimal()),
        default=math.inf,
    )


def _incarnation(env: Env) -> str:
    """Return which start of its job this is: Slurm counts those of one job, and a chain of jobs is told its own.

    >>> _incarnation({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}), _incarnation({})
    ('17:2', '')
    """
    job = env.get("SLURM_JOB_ID", "")
    return env.get(handover.INCARNATION) or (
        f"{job}:{env.get('SLURM_RESTART_COUNT', '0')}" if job else ""
    )


def _from_paceline(env: Env, parent: int) -> World:
    rank, size, file = _number(env, "RANK"), _number(env, "WORLD_SIZE"), Path(env[handover.MEETING])
    if handover.ADDRESS not in env:
        return World(
            rank,
            size,
            rank,
            size,
            launcher="paceline",
            meeting=FileRendezvous(file),
            launcher_file=file,
        )
    each = _number(env, "LOCAL_WORLD_SIZE")
    address, _, attempt = env[handover.ADDRESS].partition("/")
    meeting = TcpRendezvous(
        *split_address(address), serve=rank == 0, prefix=f"paceline-{attempt or 0}"
    )
    return World(
        rank,
        size,
        rank % each,
        each,
        rank // each,
        size // each,
        "paceline",
        meeting,
        launcher_file=file,
    )


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
        TcpRendezvous(
            _word(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"), rank == 0 and not agent, prefix
        )
        if size > 1
        else None
    )
    node = _number(env, "GROUP_RANK", rank // local_size)
    nodes = _number(env, "GROUP_WORLD_SIZE", _ceil(size, local_size))
    return World(rank, size, local_rank, local_size, node, nodes, "torchrun", meeting)


def _from_slurm(env: Env, parent: int) -> World:
    """Read a task of `srun`. A batch shell has SLURM_PROCID too, so the mark is the step's own variable."""
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    nodes, node = _number(env, "SLURM_STEP_NUM_NODES", 1), _number(env, "SLURM_NODEID", 0)
    local_size = _slurm_tasks_here(
        env.get("SLURM_STEP_TASKS_PER_NODE", str(_ceil(size, nodes))), node
    )
    names = [
        _number(env, "SLURM_JOB_ID"),
        _number(env, "SLURM_STEP_ID"),
        _number(env, "SLURM_RESTART_COUNT", 0),
    ]
    if (
        "SLURM_STEP_LAUNCHER_PORT" in env
    ):  # srun's own: a new controller counts its jobs from 1 again
        names.append(_number(env, "SLURM_STEP_LAUNCHER_PORT"))
    key = "-".join(["slurm", *map(str, names)])
    meeting = _meeting(
        env, key, size, nodes, lambda: _meeting_of_nodes(env, key, node, serve=rank == 0)
    )
    return World(
        rank, size, _number(env, "SLURM_LOCALID"), local_size, node, nodes, "slurm", meeting
    )


def _meeting_of_nodes(
    env: Env, key: str, node: int, *, serve: bool
) -> TcpRendezvous | PublishedRendezvous:
    """Return where the tasks of a step meet: at the port that was chosen for them, else where rank 0 says."""
    given, suffix = env.get("MASTER_ADDR", ""), env.get(handover.HOST_SUFFIX, "")
    nodes = (
        []
        if given
        else [name + suffix for name in expand_hostlist(_word(env, "SLURM_STEP_NODELIST"))]
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


def _from_openmpi(env: Env, parent: int) -> World:
    rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    local_rank, local_size = (
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
    return _from_mpi(env, parent, rank, size, local_rank, local_size, "openmpi")


def _from_pmi(env: Env, parent: int) -> World:
    rank, size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    local_rank, local_size = (
        _number(env, "MPI_LOCALRANKID", rank),
        _number(env, "MPI_LOCALNRANKS", size),
    )
    return _from_mpi(env, parent, rank, size, local_rank, local_size, "pmi")


def _from_mpi(
    env: Env, parent: int, rank: int, size: int, local_rank: int, local_size: int, launcher: str
) -> World:
    nodes = _ceil(size, local_size)
    key = f"mpi-{parent}"
    meeting = _meeting(env, key, size, nodes, lambda: _meeting_of_mpi(env, serve=rank == 0))
    return World(rank, size, local_rank, local_size, rank // local_size, nodes, launcher, meeting)  # type: ignore[arg-type]


def _meeting_of_mpi(env: Env, *, serve: bool) -> TcpRendezvous | PublishedRendezvous:
    job = next((env[name] for name in _MPI_JOB if env.get(name)), "")
    key = "mpi-" + re.sub(r"[^\w-]", "_", job)
    if "MASTER_ADDR" in env or "MASTER_PORT" in env or not job:
        return TcpRendezvous(_word(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"), serve, key)
    return PublishedRendezvous(key, "", (), serve)


# What names one job of mpirun alike on all its nodes: Open MPI's, then Hydra's.
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")

# The first mark found wins: a launcher inside another (mpirun or torchrun in a Slurm job) is the nearer one.
_LAUNCHERS: list[tuple[str, Callable[[Env, int], World]]] = [
    (handover.MEETING, _from_paceline),
    ("TORCHELASTIC_RUN_ID", _from_torchrun),
    ("OMPI_COMM_WORLD_RANK", _from_openmpi),
    ("SLURM_STEP_NUM_TASKS", _from_slurm),
    ("PMI_RANK", _from_pmi),
]


def _meeting(
    env: Env,
    key: str,
    size: int,
    nodes: int,
    of_nodes: Callable[[], TcpRendezvous | PublishedRendezvous],
) -> Meeting | None:
    """Choose where to meet: nobody alone, one node in a file, several over TCP."""
    if size == 1:
        return None
    if nodes > 1:
        return of_nodes()
    return FileRendezvous(Path(env.get("TMPDIR", "/tmp")) / f"paceline-{key}" / "meeting")  # noqa: S108 - claimed as private before use


def _slurm_tasks_here(text: str, node: int) -> int:
    """Return the tasks of one node from Slurm's short form.

    >>> [_slurm_tasks_here("2(x2),1", node) for node in range(3)]
    [2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(found[1])] * int(found[2] or 1) if found else []
    if node >= len(counts):
        raise EnvironmentUnfit(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} does not say how many tasks node {node} has",
            fix="do not export SLURM variables by hand; start with `srun`, or with `paceline run` inside the allocation",
        )
    return counts[node]


def _number(env: Env, name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    word = _word(env, name)
    if not word.isdecimal():
        raise EnvironmentUnfit(
            f"the variable {name}={word!r} is not a number",
            fix=f"unset {name}, or start with `paceline run`",
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
