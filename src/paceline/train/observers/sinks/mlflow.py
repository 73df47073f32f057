"""Metrics for MLflow, at the address in MLFLOW_TRACKING_URI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.events import EpochDone, Event, RunEnded, RunStarted, StepDone
from paceline.train.observers.sinks.bookmark import Bookmark
from paceline.train.observers.sinks.metrics import epoch_metrics, finite, step_metrics

_EXPERIMENT = "paceline"
_MAX_VALUE_LETTERS = 500  # accepted by every version of MLflow
_MAX_PARAMS_PER_REQUEST = 100


class MlflowSink:
    """Logs through MLflow's client, which has no global state. MLFLOW_EXPERIMENT_NAME selects the experiment."""

    def __init__(
        self,
        path: Path,
        name: str,
        settings: Mapping[str, Any],
        *,
        is_new: bool,
        experiment: str = "",
    ) -> None:
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

        self._client: Any = MlflowClient()
        self._mark = Bookmark(path)
        self._name, self._settings, self._is_new = name, settings, is_new
        self._experiment = experiment or _EXPERIMENT
        self._run, self._status = "", "KILLED"

    def __call__(self, event: Event) -> None:
        """Log a step or an epoch."""
        if isinstance(event, RunStarted):
            self._run = self._mark.begin(self._create, is_new=self._is_new)
            self._client.update_run(self._run, "RUNNING")
        elif isinstance(event, StepDone) and self._mark.passes("step", event.step):
            self._log(step_metrics(event), event)
        elif isinstance(event, EpochDone) and self._mark.passes("epoch", event.step):
            self._log(epoch_metrics(event), event)
        elif isinstance(event, RunEnded):
            self._status = "FINISHED"

    def _create(self) -> str:
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        existing = self._client.get_experiment_by_name(self._experiment)
        if existing:
            experiment = existing.experiment_id
        else:
            experiment = self._client.create_experiment(self._experiment)
        run = str(self._client.create_run(experiment, run_name=self._name).info.run_id)
        params = []
        for name, value in self._settings.items():
            params.append(Param(name, str(value)[:_MAX_VALUE_LETTERS]))
        for first in range(0, len(params), _MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(run, params=params[first : first + _MAX_PARAMS_PER_REQUEST])
        return run

    def _log(self, values: dict[str, float], event: StepDone | EpochDone) -> None:
        from mlflow.entities import Metric

        when = int(event.time_s * 1000)
        metrics = []
        for name, value in finite(values).items():
            metrics.append(Metric(name, value, when, event.step))
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        """Set the final status; a stopped run counts as killed until it resumes."""
        if self._run:
            self._client.set_terminated(self._run, "FAILED" if failed else self._status)
        self._mark.close()
