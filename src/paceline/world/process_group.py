"""How ranks meet, and how they part."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from paceline import handover
from paceline.config import RunConfig
from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError
from paceline.rundir import RunDir
from paceline.world.address import refuse_loopback_name
from paceline.world.detect import detect_world
from paceline.world.device import choose_backend, choose_device, prepare_device
from paceline.world.network import call_the_roll, prepare_network
from paceline.world.parent_death import die_with_parent
from paceline.world.randomness import seed_everything
from paceline.world.rendezvous import Look, claim_folder, open_published_store, open_tcp_store
from paceline.world.rendezvous_file import Notice
from paceline.world.roll_call import RollCall
from paceline.world.timelimit import job_end
from paceline.world.world import FileRendezvous, PublishedRendezvous, TcpRendezvous, World

_DESTROYED_GROUPS: list[dist.ProcessGroup] = []
"""Groups that were left, kept for good. Whoever frees one holds Python's lock and waits for gloo's threads, of which one may
be waiting for that lock to let go of the last tensors: seen as a rank that never ended, on a busy machine."""


@contextlib.contextmanager
def join(config: RunConfig) -> Iterator[World]:
    """Find out who we are, meet the other ranks, and leave together.

    Works the same alone, under `paceline run`, `torchrun`, `srun` and `mpirun`. Generators are seeded, so
    that a model built inside has the same first weights on every rank of every world.
    """
    world = detect_world(os.environ, os.getppid())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # a killed agent would leave its ranks training on
    world = _meet_nodes(world, config) if world.nodes > 1 else _meet_here(world, config)
    seed_everything(config.seed)
    try:
        yield world
        wait_for_all(world)
    finally:
        _leave(world)


def wait_for_all(world: World) -> None:
    """Hold every rank until all are here."""
    if world.size > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.barrier()


def shorten_timeout(world: World, config: RunConfig) -> None:
    """Wait less from now on: the first step, with its compilations and cold file systems, is behind us."""
    if world.size > 1:
        for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - no public way
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=config.timeout.step_s), group)  # noqa: SLF001


def _check_fits(world: World, config: RunConfig) -> None:
    lanes = config.batch.lanes
    if world.size > lanes:
        raise ConfigError(
            f"{world.size} ranks cannot share {lanes} lanes",
            fix=f"set batch.lanes={world.size}, or start at most {lanes} ranks",
        )
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


def _prepare(world: World, config: RunConfig) -> World:
    """Find out what this rank can do by itself."""
    _check_fits(world, config)
    if world.launcher == "slurm" and world.is_main and math.isinf(world.deadline_s):
        world = replace(world, deadline_s=job_end(os.environ))
    world = replace(world, device=choose_device(world, config))
    prepare_device(world, config)
    return world


def _meet_here(world: World, config: RunConfig) -> World:
    """Meet the ranks of this machine, if there are others."""
    world, timeout = _prepare(world, config), timedelta(seconds=config.timeout.start_s)
    if world.size > 1:
        store, _ = _open_store(world, config, None)
        keep_to_loopback()
        backend = choose_backend(world, config, store)
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
    return world


def _meet_nodes(world: World, config: RunConfig) -> World:
    """Meet the ranks of all nodes, and see that they reach each other; what is wrong on one is the error of all."""
    timeout = timedelta(seconds=config.timeout.start_s)
    notice = Notice(RunDir.of(config).meetings, _key(world))
    try:
        if notice.key:
            with contextlib.suppress(EnvironmentUnfit):  # whoever cannot do without it will say so
                notice.prepare()
        store, own = _open_store(world, config, notice)
        roll = _roll(world, store, notice, config.timeout.start_s)
        with roll.one_fate():
            world = _prepare(world, config)
            everyone = call_the_roll(world, roll, own)
            backend = choose_backend(world, config, store)
            prepare_network(world, roll, own, everyone, backend)
    except PacelineError as error:
        if notice.key:
            notice.complain(error)
        raise
    finally:
        if notice.key and world.is_main:
            notice.withdraw()
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    return world


def _key(world: World) -> str:
    """Return what names this start of a job and no other; empty where nothing does."""
    if isinstance(world.meeting, PublishedRendezvous):
        return world.meeting.key
    return (
        world.meeting.prefix
        if isinstance(world.meeting, TcpRendezvous) and world.launcher == "slurm"
        else ""
    )


def _roll(world: World, store: Store, notice: Notice, timeout_s: float) -> RollCall:
    serve = (
        not isinstance(world.meeting, FileRendezvous)
        and world.meeting is not None
        and world.meeting.serve
    )
    return RollCall(
        store, world.rank, world.size, serve=serve, timeout_s=timeout_s, look=_look(notice)
    )


def _look(notice: Notice | None) -> Look:
    return notice.read if notice and notice.key else lambda: None


def _open_store(world: World, config: RunConfig, notice: Notice | None) -> tuple[Store, str]:
    """Open the store in which the ranks meet; return it and the address of this rank on the way to it."""
    timeout, silence_s = timedelta(seconds=config.timeout.start_s), config.timeout.step_s
    quiet = world.local_rank > 0  # one voice of each node is enough
    if world.launcher_file is not None:
        handover.joined_mark(world.launcher_file, world.rank).touch(mode=0o600)
    if isinstance(world.meeting, FileRendezvous):
        claim_folder(world.meeting.path.parent)
        store: Store = FileStore(str(world.meeting.path), world.size)
        store.set_timeout(timeout)
        return store, ""
    if isinstance(world.meeting, PublishedRendezvous):
        assert notice is not None
        return open_published_store(
            world.meeting, world.interface, notice, timeout, silence_s, quiet=quiet
        )
    assert world.meeting is not None
    if world.meeting.serve and world.nodes > 1:
        refuse_loopback_name(world.meeting.host)
    return open_tcp_store(
        world.meeting, timeout, silence_s, look=_look(notice), quiet=quiet, first=world.is_main
    )


def keep_to_loopback() -> None:
    """Let gloo listen on loopback only, where all ranks are here: else it takes the address of the host name."""
    if loopback := next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), ""):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _leave(world: World) -> None:
    if dist.is_initialized():
        _DESTROYED_GROUPS.extend(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - no public way
        dist.destroy_process_group()
    if isinstance(world.meeting, FileRendezvous) and world.launcher != "paceline" and world.is_main:
        shutil.rmtree(world.meeting.path.parent, ignore_errors=True)
