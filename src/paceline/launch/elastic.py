"""torch's elastic agent on each of several nodes, with our own rendezvous.

The first agent binds a free port on one address and publishes it; no pickle is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.config import RunConfig, config_from_words
from paceline.errors import EnvironmentUnfit
from paceline.rundir import RunDir
from paceline.world.address import listen_at
from paceline.world.rendezvous import open_published_store, serve_store
from paceline.world.rendezvous_file import RendezvousFile
from paceline.world.world import PublishedRendezvous, World

_BACKEND = "paceline"


def run_agent(world: World, ranks: int, module: str, argv: Sequence[str]) -> int:
    """Run the ranks of this node to their end; return the exit code of the first that failed."""
    with _Rendezvous(world) as rendezvous:
        rendezvous_handler_registry.register(_BACKEND, lambda _: rendezvous)
        config = LaunchConfig(
            min_nodes=world.size,
            max_nodes=world.size,
            nproc_per_node=ranks,
            run_id=rendezvous.run_id,
            rdzv_backend=_BACKEND,
            max_restarts=0,  # the job itself restarts, from its newest checkpoint
            monitor_interval=0.1,
            signals_to_handle="SIGQUIT",  # we forward the other signals
            logs_specs=DefaultLogsSpecs(os.devnull),  # otherwise a folder remains on every node
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *argv)
        except ChildFailedError as error:
            code = int(error.get_first_failure()[1].exitcode)
            return 128 - code if code < 0 else code or 1
    return 0


class _Rendezvous(RendezvousHandler):
    """Rendezvous of the agents; the ranks use the same store."""

    def __init__(self, world: World) -> None:
        self._world = world
        config = config_from_words(RunConfig, [], env=os.environ)
        key = world.rendezvous.key if isinstance(world.rendezvous, PublishedRendezvous) else "alone"
        self.run_id = key
        self._timeout = timedelta(seconds=config.timeout.start_s)
        self._file = RendezvousFile(RunDir.of(config).meetings, key)
        self._store, self._info = self._open()

    def _open(self) -> tuple[Store, RendezvousStoreInfo]:
        rendezvous = self._world.rendezvous
        if self._world.size == 1:
            listener = listen_at("127.0.0.1", 0)
            address, port = listener.getsockname()
            return serve_store(listener, self.run_id, self._timeout)[0], RendezvousStoreInfo(
                address, port
            )
        if not isinstance(rendezvous, PublishedRendezvous):
            raise EnvironmentUnfit(
                f"MASTER_PORT is set for {self._world.size} elastic agents, so all jobs of a node would share one port",
                fix="unset MASTER_PORT, and start one agent per node with `paceline submit --launcher torchrun`",
            )
        store, _ = open_published_store(
            rendezvous, self._world.interface, self._file, self._timeout
        )
        address = self._file.read()
        assert address is not None
        return store, RendezvousStoreInfo(*address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._world.is_main and self._world.size > 1:
            self._file.remove()

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and the number of this agent."""
        return RendezvousInfo(self._store, self._world.rank, self._world.size, self._info)

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks are clients of the agents' store."""
        return True

    def get_backend(self) -> str:
        """Return the name in torch's registry."""
        return _BACKEND

    def is_closed(self) -> bool:
        """Return False: the agents are known from the start."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the agents are known from the start."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the agents are known from the start."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of this rendezvous."""
        return self.run_id

    def shutdown(self) -> bool:
        """Do nothing; the context manager closes the rendezvous."""
        return True
