"""How ranks meet, and how they part."""

from __future__ import annotations

import contextlib
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
from paceline.errors import ConfigError
from paceline.world.detect import detect_world
from paceline.world.device import choose_backend, choose_device, prepare_device
from paceline.world.facts import FileMeeting, World
from paceline.world.meeting import claim_folder, open_tcp_store
from paceline.world.orphan import die_with_parent
from paceline.world.randomness import seed_everything


@contextlib.contextmanager
def join(config: RunConfig) -> Iterator[World]:
    """Find out who we are, meet the other ranks, and leave together.

    Works the same alone, under `paceline run`, `torchrun`, `srun` and `mpirun`. Generators are seeded, so
    that a model built inside has the same first weights on every rank of every world.
    """
    world = detect_world(os.environ, os.getppid())
    _check_fits(world, config)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # a killed agent would leave its ranks training on
    world = replace(world, device=choose_device(world, config))
    prepare_device(world, config)
    if world.size > 1:
        _meet(world, config)
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
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=config.timeout.step_s))  # noqa: SLF001 - no public way


def _check_fits(world: World, config: RunConfig) -> None:
    lanes = config.batch.lanes
    if world.size > lanes:
        raise ConfigError(
            f"{world.size} ranks cannot share {lanes} lanes",
            fix=f"set batch.lanes={world.size}, or start at most {lanes} ranks",
        )
    if world.size > 1 and config.parallel == "none":
        raise ConfigError(
            f"parallel=none on {world.size} ranks would train {world.size} separate models",
            fix="set parallel=ddp, or start one rank",
        )


def _meet(world: World, config: RunConfig) -> None:
    timeout = timedelta(seconds=config.timeout.start_s)
    store = _open_store(world, timeout)
    if world.nodes == 1 and (loopback := _loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # gloo would listen on the address of the host name
    backend = choose_backend(world, config, store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _open_store(world: World, timeout: timedelta) -> Store:
    if isinstance(world.meeting, FileMeeting):
        claim_folder(world.meeting.path.parent)
        handover.joined_mark(world.meeting.path, world.rank).touch(mode=0o600)
        store: Store = FileStore(str(world.meeting.path), world.size)
        store.set_timeout(timeout)
        return store
    assert world.meeting is not None
    return open_tcp_store(world.meeting, timeout)


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), "")


def _leave(world: World) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if isinstance(world.meeting, FileMeeting) and world.launcher != "paceline" and world.is_main:
        shutil.rmtree(world.meeting.path.parent, ignore_errors=True)
