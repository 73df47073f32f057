"""The run folder, opened and locked by rank 0: events, settings, loggers, and the reason of a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from paceline.config import RunConfig
from paceline.config.values import to_toml
from paceline.errors import Stopped
from paceline.events import Event, EventLog, RunFailed, Sink
from paceline.rundir import RunDir, make_private, write_whole, writing_to
from paceline.runlock import Claim, claimed
from paceline.train.observers.console import Console
from paceline.train.observers.environment import environment_facts
from paceline.train.observers.loggers import Loggers, check_packages
from paceline.world.world import World


class RunFolder:
    """Where the events of a run go. Only rank 0 writes."""

    def __init__(self, config: RunConfig, world: World, sinks: Sequence[Sink] = ()) -> None:
        check_packages(config)
        self._config, self._world = config, world
        self._sinks = list(sinks)
        self.directory = RunDir.of(config)
        self.claim: Claim | None = None

    def emit(self, event: Event) -> None:
        """Pass an event to all sinks."""
        if self._world.is_main:
            for sink in self._sinks:
                sink(event)

    @contextlib.contextmanager
    def opened(self, done: Callable[[], int]) -> Iterator[None]:
        """Open and lock the folder, and log the error if the run fails; `done` returns the completed steps."""
        self.directory.refuse_links()
        if not self._world.is_main:
            yield
            return
        with writing_to(self.directory.root):
            make_private(self.directory.root)
        with (
            claimed(self.directory.lock, self._world.incarnation) as self.claim,
            EventLog(self.directory.events) as log,
            Loggers(self._config, self._world, self.directory) as loggers,
        ):
            with writing_to(self.directory.environment):
                facts = environment_facts(self._world.device).encode()
                write_whole(self.directory.environment, facts)
            self._sinks += [log, Console(self._config), loggers]
            try:
                yield
            except Stopped:
                raise
            except BaseException as error:
                self.claim.check()  # if another process has taken the run over, it has not failed
                log(RunFailed(done(), self._world.rank, f"{type(error).__name__}: {error}"))
                raise

    def write_settings(self, config: RunConfig) -> None:
        """Write the settings of the run."""
        if self._world.is_main:
            with writing_to(self.directory.config):
                write_whole(self.directory.config, to_toml(config).encode())
