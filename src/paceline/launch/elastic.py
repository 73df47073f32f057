"""How torch's elastic agents of several nodes meet, and run the ranks of theirs.

They meet at a port that the first one has bound itself and published, on one address, and no pickle is read.
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
from paceline.world.rendezvous_file import Notice
from paceline.world.world import PublishedRendezvous, World

_BACKEND = "paceline"


def run_agent(world: World, ranks: int, module: str, words: Sequence[str]) -> int:
    """Run torch's elastic agent until the ranks of this node have ended; return the exit code."""
    with _Meeting(world) as meeting:
        rendezvous_handler_registry.register(_BACKEND, lambda _: meeting)
        config = LaunchConfig(
            min_nodes=world.size,
            max_nodes=world.size,
            nproc_per_node=ranks,
            run_id=meeting.run_id,
            rdzv_backend=_BACKEND,
            max_restarts=0,  # the job itself is started again, from its newest checkpoint
            monitor_interval=0.1,
            signals_to_handle="SIGQUIT",  # the others are ours to pass on
            logs_specs=DefaultLogsSpecs(os.devnull),  # else a folder is left on every node
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *words)
        except ChildFailedError as error:
            code = int(error.get_first_failure()[1].exitcode)
            return 128 - code if code < 0 else code or 1
    return 0


class _Meeting(RendezvousHandler):
    """Where the agents meet; the ranks use the same store."""

    def __init__(self, world: World) -> None:
        self._world = world
        config = config_from_words(RunConfig, [], env=os.environ)
        key = world.rendezvous.key if isinstance(world.rendezvous, PublishedRendezvous) else "alone"
        self.run_id = key
        self._timeout = timedelta(seconds=config.timeout.start_s)
        self._notice = Notice(RunDir.of(config).meetings, key)
        self._store, self._info = self._open()

    def _open(self) -> tuple[Store, RendezvousStoreInfo]:
        meeting = self._world.rendezvous
        if self._world.size == 1:
            listener = listen_at("127.0.0.1", 0)
            address, port = listener.getsockname()
            return serve_store(listener, self.run_id, self._timeout)[0], RendezvousStoreInfo(
                address, port
            )
        if not isinstance(meeting, PublishedRendezvous):
            raise EnvironmentUnfit(
                f"{self._world.size} elastic agents, but MASTER_PORT is set, so one port would serve all jobs of a node",
                fix="unset MASTER_PORT, and start one agent per node by `paceline submit --launcher torchrun`",
            )
        store, _ = open_published_store(meeting, self._world.interface, self._notice, self._timeout)
        found = self._notice.read()
        assert found is not None
        return store, RendezvousStoreInfo(*found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._world.is_main and self._world.size > 1:
            self._notice.withdraw()

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store in which all agents meet, and which of them this is."""
        return RendezvousInfo(self._store, self._world.rank, self._world.size, self._info)

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks are clients of the agents' store."""
        return True

    def get_backend(self) -> str:
        """Return the name under which torch knows this."""
        return _BACKEND

    def is_closed(self) -> bool:
        """Return whether no agent may come any more."""
        return False

    def set_closed(self) -> None:
        """Let nobody in any more: all agents are known from the start."""

    def num_nodes_waiting(self) -> int:
        """Return how many more agents would like to come: none."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of this meeting."""
        return self.run_id

    def shutdown(self) -> bool:
        """End the meeting."""
        return True
