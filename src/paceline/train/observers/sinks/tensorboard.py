"""Metrics for TensorBoard: event files in runs/NAME/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.events import EpochDone, Event, RunStarted, StepDone
from paceline.rundir import make_private
from paceline.train.observers.sinks.metrics import epoch_metrics, step_metrics


class TensorboardSink:
    """Writes scalars. A resumed run makes TensorBoard ignore earlier values after its checkpoint."""

    def __init__(self, folder: Path, settings: str) -> None:
        self._folder, self._settings = make_private(folder), settings
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """Write a step or an epoch."""
        if isinstance(event, RunStarted):
            self._open(event.from_step)
        elif isinstance(event, StepDone):
            self._write(step_metrics(event), event)
        elif isinstance(event, EpochDone):
            self._write(epoch_metrics(event), event)
            self._flush()

    def _open(self, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=from_step + 1)
        if not from_step:
            self._writer.add_text("settings", f"```\n{self._settings}\n```", 0)
        self._flush()

    def _write(self, metrics: dict[str, float], event: StepDone | EpochDone) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, event.step, walltime=event.time_s)

    def _flush(self) -> None:
        """Flush, and make the files readable by their owner only: the package lets everybody read them."""
        self._writer.flush()
        for path in self._folder.iterdir():
            path.chmod(0o600)

    def close(self, *, failed: bool) -> None:
        """Flush and close the files."""
        if self._writer is not None:
            self._flush()
            self._writer.close()
