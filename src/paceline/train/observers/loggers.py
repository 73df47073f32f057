"""Metrics loggers besides events.jsonl (`log.to`); they can neither delay nor stop a training."""

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
from paceline.train.observers.sinks.csvfile import CsvSink
from paceline.train.observers.sinks.mlflow import MlflowSink
from paceline.train.observers.sinks.tensorboard import TensorboardSink
from paceline.train.observers.sinks.wandb import WandbSink
from paceline.world.world import World

_MAX_QUEUED = 10_000
_CLOSE_TIMEOUT_S = 10.0  # a run that was asked to stop has little time left
_PIP_NAMES = {"mlflow": "mlflow-skinny"}


class Logger(Protocol):
    """A sink that must be closed."""

    def __call__(self, event: Event) -> None:
        """Log one event."""

    def close(self, *, failed: bool) -> None:
        """Flush, and record whether the run failed."""


def check_packages(config: RunConfig) -> None:
    """Refuse a logger whose package is missing. Every rank must call this, so that all fail alike."""
    for name in config.log.sinks:
        if name != "csv" and not _is_installed(name):
            raise ConfigError(
                f"log.to={config.log.to} needs the package {name}, which is not installed",
                fix=f"pip install {_PIP_NAMES.get(name, name)}, or remove {name} from log.to",
            )


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder such as ./wandb of an earlier run is not a package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class Loggers:
    """Passes events to the sinks of `log.to` in a thread. A sink that fails is reported once and then skipped."""

    def __init__(self, config: RunConfig, world: World, directory: RunDir) -> None:
        self._queue: queue.Queue[Event | None] = queue.Queue(_MAX_QUEUED)
        self._makers: dict[str, Callable[[], Logger]] = {}
        for name in config.log.sinks:
            self._makers[name] = partial(make_sink, name, config, world, directory)
        self._sinks: dict[str, Logger] = {}
        self._failed = self._dropped = False
        self._thread = threading.Thread(target=self._forward_events, name="loggers", daemon=True)

    def __call__(self, event: Event) -> None:
        """Queue one event; never blocks."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            if not self._dropped:
                names = ", ".join(self._makers)
                _say(f"the loggers ({names}) cannot keep up; they will miss some metrics")
            self._dropped = True

    def _forward_events(self) -> None:
        for name in self._makers:
            self._guarded(name, partial(self._open, name))
        while event := self._queue.get():
            for name, sink in list(self._sinks.items()):
                self._guarded(name, partial(sink, event))
        for name, sink in list(self._sinks.items()):
            self._guarded(name, partial(sink.close, failed=self._failed))

    def _open(self, name: str) -> None:
        self._sinks[name] = self._makers[name]()

    def _guarded(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - no error of another package may stop the training
            self._sinks.pop(name, None)
            reason = without_logins(f"{type(error).__name__}: {error}")
            _say(f"the {name} logger failed ({reason}); the training continues without it")

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
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            names = ", ".join(self._makers)
            _say(
                f"the loggers ({names}) did not close within {_CLOSE_TIMEOUT_S:.0f} s; their last metrics may be missing"
            )


def make_sink(name: str, config: RunConfig, world: World, directory: RunDir) -> Logger:
    """Return the logger for one name of `log.to`."""
    settings: dict[str, Any] = without_secrets(dict(flatten(config)))
    is_new = config.resume == "never" and not world.is_restart
    if name == "csv":
        return CsvSink(directory.csv)
    if name == "tensorboard":
        text = "\n".join(f"{key} = {value}" for key, value in settings.items())
        return TensorboardSink(directory.tensorboard, text)
    if name == "mlflow":
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
        return MlflowSink(
            directory.bookmark(name), config.name, settings, is_new=is_new, experiment=experiment
        )
    project = os.environ.get("WANDB_PROJECT", "")
    return WandbSink(
        directory.bookmark(name), config.name, settings, is_new=is_new, project=project
    )


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)
