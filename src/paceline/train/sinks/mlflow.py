"""A run for MLflow, at the address that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.events import EpochDone, Event, RunEnded, RunStarted, StepDone
from paceline.train.sinks.bookmark import Bookmark
from paceline.train.sinks.metrics import epoch_metrics, finite, step_metrics

_EXPERIMENT = "paceline"
_LONGEST = 500  # letters of a parameter's value that every MLflow takes
_AT_ONCE = 100  # parameters that it takes in one request


class MlflowSink:
    """Logs through MLflow's client, which keeps no global state. MLFLOW_EXPERIMENT_NAME names another experiment."""

    def __init__(
        self,
        path: Path,
        name: str,
        settings: Mapping[str, Any],
        *,
        anew: bool,
        experiment: str = "",
    ) -> None:
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

        self._client: Any = MlflowClient()
        self._mark = Bookmark(path)
        self._name, self._settings, self._anew = name, settings, anew
        self._experiment = experiment or _EXPERIMENT
        self._run, self._status = "", "KILLED"

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RunStarted):
            self._run = self._mark.begin(self._create, anew=self._anew)
            self._client.update_run(self._run, "RUNNING")
        elif isinstance(event, StepDone) and self._mark.passes("step", event.step):
            self._log(step_metrics(event), event)
        elif isinstance(event, EpochDone) and self._mark.passes("epoch", event.step):
            self._log(epoch_metrics(event), event)
        elif isinstance(event, RunEnded):
            self._status = "FINISHED"

    def _create(self) -> str:
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        found = self._client.get_experiment_by_name(self._experiment)
        home = found.experiment_id if found else self._client.create_experiment(self._experiment)
        run = str(self._client.create_run(home, run_name=self._name).info.run_id)
        params = [Param(name, str(value)[:_LONGEST]) for name, value in self._settings.items()]
        for first in range(0, len(params), _AT_ONCE):
            self._client.log_batch(run, params=params[first : first + _AT_ONCE])
        return run

    def _log(self, figures: dict[str, float], event: StepDone | EpochDone) -> None:
        from mlflow.entities import Metric

        when = int(event.time_s * 1000)
        metrics = [Metric(name, value, when, event.step) for name, value in finite(figures).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        """Say how it ended; a run that was stopped counts as killed until it goes on."""
        if self._run:
            self._client.set_terminated(self._run, "FAILED" if failed else self._status)
        self._mark.close()
