"""Joining the process group, and leaving it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from paceline import handover
from paceline.config import RunConfig
from paceline.config.given import with_values
from paceline.config.lanes import AutoLanes, choose_lanes
from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError
from paceline.rundir import RunDir
from paceline.world.address import refuse_loopback_name
from paceline.world.detect import detect_world
from paceline.world.device import choose_backend, choose_device, prepare_device
from paceline.world.job import job_end
from paceline.world.network import call_the_roll, prepare_network
from paceline.world.parent_death import die_with_parent
from paceline.world.randomness import seed_everything
from paceline.world.rendezvous import (
    Look,
    claim_folder,
    nonce_of,
    open_published_store,
    open_tcp_store,
)
from paceline.world.rendezvous_file import RendezvousFile
from paceline.world.roll_call import RollCall
from paceline.world.signed_store import read_secret, signed, signing_key
from paceline.world.world import FileRendezvous, PublishedRendezvous, TcpRendezvous, World

_DESTROYED_GROUPS: list[dist.ProcessGroup] = []
"""Never freed. Freeing a group waits for gloo's threads while holding Python's lock, and one of these threads may need
that lock to free the last tensors: a rank that never exited was seen, on a busy machine."""


_LANES = "lanes"
"""The message of rank 0 in the rendezvous store with the lanes of the run."""
_NCCL_EXTRA_S = 120.0
"""The watchdog ends ranks with a verdict before torch aborts them with a C++ stack."""


C = TypeVar("C", bound=RunConfig)
Joined = tuple[World, C]
"""The world, and the settings with the number of lanes on which all ranks agree."""
FindLanes = Callable[[RunConfig, World], int]
"""Returns the lanes of the run that this start continues; 0: it begins a new one."""


@contextlib.contextmanager
def join(config: RunConfig) -> Iterator[World]:
    """Detect the world, join the process group of all ranks, and leave it together.

    Works the same alone, under `paceline run`, `torchrun`, `srun` and `mpirun`. Random generators are seeded, so
    that a model built inside has the same initial weights on every rank of every world.
    """
    with join_run(config, lambda *_: 0) as (world, _):
        yield world


@contextlib.contextmanager
def join_run(config: C, saved_lanes: FindLanes) -> Iterator[Joined[C]]:
    """Join as `join` does; return the world and the settings with their number of lanes, which rank 0 decides."""
    world = detect_world(os.environ, os.getppid())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # the ranks of a killed agent would train on
    join_ranks = _join_nodes if world.nodes > 1 else _join_here
    world, config = join_ranks(world, config, saved_lanes)
    seed_everything(config.seed)
    try:
        yield world, config
        wait_for_all(world)
    finally:
        _leave(world)


def wait_for_all(world: World) -> None:
    """Return on every rank when all have called this."""
    if world.size > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.barrier()


def shorten_timeout(world: World, config: RunConfig) -> None:
    """Set the collective timeout to timeout.step_s, after the first step with its compilation and cold file systems."""
    if world.size == 1:
        return
    seconds = config.timeout.step_s
    if config.timeout.hang_steps and dist.get_backend() == "nccl":
        seconds += _NCCL_EXTRA_S
    for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - no public way
        _set_timeout(timedelta(seconds=seconds), group)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    # torch 2.15 made the function public, and warns about the private one.
    set_timeout = getattr(dist, "set_timeout", None)
    if set_timeout is None:
        set_timeout = dist.distributed_c10d._set_pg_timeout  # noqa: SLF001
    set_timeout(timeout, group)


def _with_lanes(
    world: World, config: C, saved_lanes: FindLanes, tell_all: Callable[[str], str]
) -> C:
    """Return the settings with a number of lanes; `tell_all` returns the text of rank 0 on every rank.

    Rank 0 decides: it may be the only one that sees the run folder. A number that was given stays.
    """
    batch, lanes, saved = config.batch, int(config.batch.lanes), 0
    if world.is_main:
        saved = saved_lanes(config, world)
        lanes = choose_lanes(
            batch.lanes,
            saved=saved,
            ranks=max(world.size, world.most_size),
            on_cpu=world.device == "cpu",
            global_size=batch.global_size,
            replicas=config.local_sgd.replicas if config.local_sgd.steps else 1,
        )
    lanes, saved = map(int, tell_all(f"{lanes} {saved}").split())
    if isinstance(batch.lanes, AutoLanes):
        config = with_values(config, batch=replace(batch, lanes=lanes))
    _check_lanes(world.size, config.batch.lanes, saved, batch.global_size)
    return config


def _check_lanes(ranks: int, lanes: int, saved: int, global_size: int) -> None:
    """Raise for more ranks than lanes."""
    if ranks <= lanes:
        return
    problem, fewer = f"{ranks} ranks cannot share {lanes} lanes", f"start at most {lanes} ranks"
    if saved == lanes:
        raise ConfigError(
            f"{problem}: this run has {lanes} lanes, so at most {lanes} ranks; "
            f"a new run with batch.lanes={ranks} is another training",
            fix=f"{fewer}; or begin a new run: add batch.lanes={ranks} and another name= (or resume=never)",
        )
    size = f" batch.global_size={ranks}" if global_size < ranks else ""
    raise ConfigError(problem, fix=f"set batch.lanes={ranks}{size}, or {fewer}")


def _check_fits(world: World, config: RunConfig) -> None:
    if config.local_sgd.steps and world.size > config.local_sgd.replicas:
        raise ConfigError(
            f"{world.size} ranks cannot share {config.local_sgd.replicas} replicas",
            fix=f"start at most {config.local_sgd.replicas} ranks, or train with local_sgd.replicas={world.size}",
        )
    if world.size > 1 and config.parallel == "none":
        raise ConfigError(
            f"parallel=none on {world.size} ranks would train {world.size} separate models",
            fix="set parallel=ddp, or start one rank",
        )


def _prepare(
    world: World, config: C, saved_lanes: FindLanes, tell_all: Callable[[str], str]
) -> Joined[C]:
    """Complete and check the settings, and set up the device of this rank."""
    world = replace(world, device=choose_device(world, config))
    config = _with_lanes(world, config, saved_lanes, tell_all)
    _check_fits(world, config)
    if world.launcher == "slurm" and world.is_main and math.isinf(world.deadline_s):
        world = replace(world, deadline_s=job_end(os.environ))
    prepare_device(world, config)
    return world, config


def _join_here(world: World, config: C, saved_lanes: FindLanes) -> Joined[C]:
    """Join the ranks of this machine, if there are others."""
    if world.size == 1:
        return _prepare(world, config, saved_lanes, lambda text: text)
    store, _ = _open_store(world, config, None)

    def tell_all(text: str) -> str:
        if world.is_main:
            store.set(_LANES, text)
        return store.get(_LANES).decode()

    world, config = _prepare(world, config, saved_lanes, tell_all)
    keep_to_loopback()
    backend, timeout = (
        choose_backend(world, config, store),
        timedelta(seconds=config.timeout.start_s),
    )
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    return world, config


def _join_nodes(world: World, config: C, saved_lanes: FindLanes) -> Joined[C]:
    """Join the ranks of all nodes after a connection test; an error of one rank is raised on all."""
    timeout = timedelta(seconds=config.timeout.start_s)
    file = RendezvousFile(RunDir.of(config).meetings, _key(world))
    try:
        if file.key:
            with contextlib.suppress(EnvironmentUnfit):  # a rank that needs it raises again
                file.prepare()
        store, own = _open_store(world, config, file)
        world = replace(world, signing_key=signing_key(_secret(world, file), nonce_of(store)))
        roll = _roll_call(world, store, file, config.timeout.start_s)

        def tell_all(text: str) -> str:
            if world.is_main:
                roll.post(_LANES, text)
            return roll.wait_for(_LANES, 0)

        with roll.share_errors():
            world, config = _prepare(world, config, saved_lanes, tell_all)
            everyone = call_the_roll(world, roll, own)
            backend = choose_backend(world, config, signed(store, world.signing_key))
            prepare_network(world, roll, own, everyone, backend)
    except PacelineError as error:
        if file.key:
            file.publish_error(error)
        raise
    finally:
        if file.key and world.is_main:
            file.remove()
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    return world, config


def _key(world: World) -> str:
    """Return a unique name of this start of a job; empty if there is none."""
    if isinstance(world.rendezvous, PublishedRendezvous):
        return world.rendezvous.key
    if isinstance(world.rendezvous, TcpRendezvous) and world.launcher == "slurm":
        return world.rendezvous.prefix
    return ""


def _roll_call(world: World, store: Store, file: RendezvousFile, timeout_s: float) -> RollCall:
    rendezvous = world.rendezvous
    serve = isinstance(rendezvous, TcpRendezvous | PublishedRendezvous) and rendezvous.serve
    return RollCall(
        signed(store, world.signing_key),
        world.rank,
        world.size,
        serve=serve,
        timeout_s=timeout_s,
        look=_look(file),
    )


def _secret(world: World, file: RendezvousFile) -> str:
    """Return the secret that all ranks of the job share; empty: messages between nodes are not signed."""
    if world.secret_file is not None:
        return read_secret(world.secret_file)
    return file.secret() if isinstance(world.rendezvous, PublishedRendezvous) else ""


def _look(file: RendezvousFile | None) -> Look:
    return file.read if file and file.key else lambda: None


def _open_store(world: World, config: RunConfig, file: RendezvousFile | None) -> tuple[Store, str]:
    """Open the store of the rendezvous; return it and the own address of this rank on the way to it."""
    timeout, silence_s = timedelta(seconds=config.timeout.start_s), config.timeout.step_s
    quiet = world.local_rank > 0  # one message per node is enough
    if world.launcher_file is not None:
        handover.joined_mark(world.launcher_file, world.rank).touch(mode=0o600)
    if isinstance(world.rendezvous, FileRendezvous):
        claim_folder(world.rendezvous.path.parent)
        store: Store = FileStore(str(world.rendezvous.path), world.size)
        store.set_timeout(timeout)
        return store, ""
    if isinstance(world.rendezvous, PublishedRendezvous):
        assert file is not None
        return open_published_store(
            world.rendezvous, world.interface, file, timeout, silence_s, quiet=quiet
        )
    assert world.rendezvous is not None
    if world.rendezvous.serve and world.nodes > 1:
        refuse_loopback_name(world.rendezvous.host)
    return open_tcp_store(
        world.rendezvous, timeout, silence_s, look=_look(file), quiet=quiet, first=world.is_main
    )


def keep_to_loopback() -> None:
    """Make gloo listen on loopback only, for ranks of one machine; by default it uses the address of the host name."""
    if loopback := next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), ""):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _leave(world: World) -> None:
    if dist.is_initialized():
        _DESTROYED_GROUPS.extend(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - no public way
        dist.destroy_process_group()
    if (
        isinstance(world.rendezvous, FileRendezvous)
        and world.launcher != "paceline"
        and world.is_main
    ):
        shutil.rmtree(world.rendezvous.path.parent, ignore_errors=True)
