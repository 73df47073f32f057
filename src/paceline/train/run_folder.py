"""The run folder, opened and locked by rank 0: events, settings, loggers, and the reason of a failure."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from paceline.checkpoint.find import open_storage
from paceline.checkpoint.read_ahead import ReadAhead
from paceline.config import RunConfig
from paceline.config.values import to_toml
from paceline.errors import BadCheckpoint, ConfigError, EnvironmentUnfit, PacelineError, Stopped
from paceline.events import Event, EventLog, RunFailed, RunStarted, Sink, is_finished
from paceline.launch.rank_local import lost_peer
from paceline.rundir import RunDir, make_private, write_whole, writing_to
from paceline.runlock import Claim, claimed
from paceline.safe_open import read_text
from paceline.train.observers.console import Console
from paceline.train.observers.environment import environment_facts
from paceline.train.observers.loggers import Loggers, check_packages
from paceline.train.observers.progress import ProgressLine
from paceline.world.world import World


class RunFolder:
    """Where the events of a run go. Only rank 0 writes."""

    def __init__(self, config: RunConfig, world: World, sinks: Sequence[Sink] = ()) -> None:
        check_packages(config)
        self._config, self._world = config, world
        self._sinks = list(sinks)
        self.directory = RunDir.of(config)
        self.claim: Claim | None = None
        self.ahead: ReadAhead | None = None
        """The newest checkpoint, if it is in a folder: it is read while the script builds its model."""
        self._facts: Future[str]
        self._started = False
        self._progress: ProgressLine | None = None

    def emit(self, event: Event) -> None:
        """Pass an event to all sinks."""
        if self._world.is_main:
            self._started = self._started or isinstance(event, RunStarted)
            for sink in self._sinks:
                sink(event)

    @contextlib.contextmanager
    def opened(self, done: Callable[[], int]) -> Iterator[None]:
        """Open and lock the folder, and log the error if the run fails; `done` returns the completed steps."""
        self.directory.refuse_links()
        self._read_ahead()
        if not self._world.is_main:
            yield
            return
        with writing_to(self.directory.root):
            make_private(self.directory.root)
        with (
            ThreadPoolExecutor(1) as thread,
            claimed(self.directory.lock, self._world.incarnation) as self.claim,
            EventLog(self.directory.events) as log,
            Loggers(self._config, self._world, self.directory) as loggers,
            self._console(done) as console,
        ):
            self._sinks += [log, console, loggers]
            self._facts = thread.submit(environment_facts, self._world.device)  # it waits for git
            try:
                yield
            except Stopped:
                raise
            except BaseException as error:
                self.claim.check()  # if another process has taken the run over, it has not failed
                if not self._is_refused(error):
                    with contextlib.suppress(EnvironmentUnfit):  # a full disk, the failure itself
                        log(_failure(done(), self._world.rank, error))
                raise

    def _read_ahead(self) -> None:
        to = self._config.checkpoint.to
        if "://" in to or self._config.resume == "never":
            return
        storage = open_storage(self.directory.checkpoints, to, self._config.name)
        self.ahead = ReadAhead(storage, self._world.rank, self._world.size)

    @contextlib.contextmanager
    def _console(self, done: Callable[[], int]) -> Iterator[Console]:
        console = Console(self._config, done)
        with console.progress as self._progress:
            yield console

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Draw no progress while a debugger has the terminal."""
        if self._progress is None:
            yield
            return
        self._progress.paused = True
        self._progress.erase()
        try:
            yield
        finally:
            self._progress.paused = False

    def _is_refused(self, error: BaseException) -> bool:
        """Return whether the run is as it was: this start took no step, and was refused or came after the last one."""
        if self._started:
            return False
        return isinstance(error, ConfigError | KeyboardInterrupt) or self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether an earlier start has taken the last step."""
        return is_finished(self.directory.events)

    def remove_failure(self) -> None:
        """Remove the page about an earlier failure from a run that is complete."""
        if self._world.is_main:
            with contextlib.suppress(OSError):
                self.directory.failure.unlink(missing_ok=True)
                self.directory.failure_facts.unlink(missing_ok=True)

    def write_settings(self, config: RunConfig) -> None:
        """Write the settings and the environment of a start that is not refused."""
        if not self._world.is_main:
            return
        facts = self._facts.result()
        with writing_to(self.directory.environment):
            write_whole(self.directory.environment, facts.encode())
        with writing_to(self.directory.config):
            write_whole(self.directory.config, to_toml(config).encode())


def saved_lanes(config: RunConfig, world: World) -> int:
    """Return the lanes of the run that this start continues, from its folder or its newest checkpoint; 0: it begins.

    Only rank 0 calls this, before it has the lock of the folder.
    """
    directory = RunDir.of(config)
    if config.resume == "never" and not (
        world.is_restart and directory.was_begun_anew_by(world.launch)
    ):
        return 0
    with contextlib.suppress(OSError, ValueError):  # a file that is missing or damaged
        batch = tomllib.loads(read_text(directory.config)).get("batch")
        if isinstance(batch, dict) and isinstance(batch.get("lanes"), int):
            return int(batch["lanes"])
    storage = open_storage(directory.checkpoints, config.checkpoint.to, config.name)
    for step in storage.steps():
        with contextlib.suppress(BadCheckpoint):  # the restore reports it
            return int(storage.manifest(step).config.get("batch.lanes", 0))
    return 0


def _failure(step: int, rank: int, error: BaseException) -> RunFailed:
    if isinstance(error, KeyboardInterrupt):
        return RunFailed(step, rank, "interrupted by Ctrl-C before it could save")
    if isinstance(error, Exception) and lost_peer(error):
        return RunFailed(step, -1, "a rank ended, and the others lost the connection to it")
    if isinstance(error, PacelineError):
        return RunFailed(step, rank, f"{type(error).__name__}: {error.problem}")
    return RunFailed(step, rank, f"{type(error).__name__}: {error}")
