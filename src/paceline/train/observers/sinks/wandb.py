"""Metrics for Weights & Biases, with the account and mode in its WANDB_* variables."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.events import EpochDone, Event, RunStarted, StepDone
from paceline.rundir import make_private
from paceline.train.observers.sinks.bookmark import Bookmark
from paceline.train.observers.sinks.metrics import epoch_metrics, step_metrics

_LOGIN_TIMEOUT_S = 15  # without a key; the training then continues without this logger


class WandbSink:
    """Logs to one W&B run, which a resumed training continues. The step is a metric, because W&B's own step only grows."""

    def __init__(
        self, path: Path, name: str, settings: Mapping[str, Any], *, is_new: bool, project: str = ""
    ) -> None:
        self._folder = make_private(path.parent / "wandb")
        self._mark = Bookmark(path)
        self._name, self._settings, self._is_new = name, settings, is_new
        self._project = project or "paceline"
        self._run: Any = None

    def __call__(self, event: Event) -> None:
        """Log a step or an epoch."""
        if isinstance(event, RunStarted):
            self._open()
        elif isinstance(event, StepDone) and self._mark.passes("step", event.step):
            self._run.log(step_metrics(event) | {"step": event.step})
        elif isinstance(event, EpochDone) and self._mark.passes("epoch", event.step):
            self._run.log(epoch_metrics(event) | {"step": event.step})

    def _open(self) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        self._run = wandb.init(
            id=self._mark.begin(lambda: secrets.token_hex(4), is_new=self._is_new),
            name=self._name,
            project=self._project,
            dir=str(self._folder),
            config=dict(self._settings),
            resume="allow",
            settings=wandb.Settings(
                console="off", login_timeout=_LOGIN_TIMEOUT_S, disable_git=True, disable_code=True
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def close(self, *, failed: bool) -> None:
        """Upload the rest and end the run."""
        if self._run is not None:
            self._run.finish(exit_code=1 if failed else 0)
        self._mark.close()
