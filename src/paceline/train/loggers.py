"""Where figures go besides events.jsonl: the sinks that `log.to` names, which can hold nothing up and stop nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from paceline.config import RunConfig
from paceline.config.values import flatten
from paceline.errors import ConfigError, Stopped
from paceline.events import Event
from paceline.redact import without_logins, without_secrets
from paceline.rundir import RunDir
from paceline.train.sinks.csvfile import CsvSink
from paceline.train.sinks.mlflow import MlflowSink
from paceline.train.sinks.tensorboard import TensorboardSink
from paceline.train.sinks.wandb import WandbSink
from paceline.world.world import World

_MOST_WAITING = 10_000
_LEAVES_WITHIN_S = 10.0  # a run that was told to stop has little time left
_INSTALLED_AS = {"mlflow": "mlflow-skinny"}


class Logger(Protocol):
    """A sink that has an end."""

    def __call__(self, event: Event) -> None:
        """Take one event."""

    def close(self, *, failed: bool) -> None:
        """Write what is left."""


def check_packages(config: RunConfig) -> None:
    """Refuse a logger whose package is missing. Every rank must call this, so that all end alike."""
    for name in config.log.sinks:
        if name != "csv" and not _is_installed(name):
            raise ConfigError(
                f"log.to={config.log.to} needs the package {name}, which is not installed",
                fix=f"pip install {_INSTALLED_AS.get(name, name)}, or leave {name} out of log.to",
            )


def _is_installed(package: str) -> bool:
    """Return whether there is a package of this name; a mere folder, such as ./wandb of an earlier run, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


class Loggers:
    """Passes events on to the named sinks, from a thread. One that fails is left out from then on, and that is said once."""

    def __init__(self, config: RunConfig, world: World, directory: RunDir) -> None:
        self._waiting: queue.Queue[Event | None] = queue.Queue(_MOST_WAITING)
        self._makers = {
            name: partial(make_sink, name, config, world, directory) for name in config.log.sinks
        }
        self._sinks: dict[str, Logger] = {}
        self._failed = self._lost = False
        self._thread = threading.Thread(target=self._pass_on, name="loggers", daemon=True)

    def __call__(self, event: Event) -> None:
        """Take one event; it is never waited for."""
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            if not self._lost:
                _say(
                    f"the loggers ({', '.join(self._makers)}) cannot keep up; some figures are missing there"
                )
            self._lost = True

    def _pass_on(self) -> None:
        for name, make in self._makers.items():
            self._guarded(name, lambda name=name, make=make: self._sinks.update({name: make()}))  # type: ignore[misc]
        while event := self._waiting.get():
            for name, sink in list(self._sinks.items()):
                self._guarded(name, partial(sink, event))
        for name, sink in list(self._sinks.items()):
            self._guarded(name, partial(sink.close, failed=self._failed))

    def _guarded(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a foreign package raises, the training goes on
            self._sinks.pop(name, None)
            reason = without_logins(f"{type(error).__name__}: {error}")
            _say(f"the {name} logger failed ({reason}); the training goes on without it")

    def __enter__(self) -> Self:
        if self._makers:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._makers:
            return
        self._failed = kind is not None and not issubclass(kind, Stopped)
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_LEAVES_WITHIN_S)
        self._thread.join(_LEAVES_WITHIN_S)
        if self._thread.is_alive():
            _say(
                f"the loggers ({', '.join(self._makers)}) did not end in {_LEAVES_WITHIN_S:.0f} s and were left behind"
            )


def make_sink(name: str, config: RunConfig, world: World, directory: RunDir) -> Logger:
    """Return the sink of a name."""
    settings: dict[str, Any] = without_secrets(dict(flatten(config)))
    anew = config.resume == "never" and not world.is_restart
    if name == "csv":
        return CsvSink(directory.csv)
    if name == "tensorboard":
        return TensorboardSink(
            directory.tensorboard, "\n".join(f"{key} = {value}" for key, value in settings.items())
        )
    if name == "mlflow":
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
        return MlflowSink(
            directory.bookmark(name), config.name, settings, anew=anew, experiment=experiment
        )
    project = os.environ.get("WANDB_PROJECT", "")
    return WandbSink(directory.bookmark(name), config.name, settings, anew=anew, project=project)


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)
