"""The hooks through which another package looks into a training loop: today `paceline verify`, if `record.to` is set.

There are three: an `Examiner` of the loop, a `LaneObserver` of the updates (`exact/step.py`), and a `LaneChoice`
(`scale/batch.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from paceline.config import RunConfig
from paceline.exact.row import StepSums
from paceline.exact.step import Updates
from paceline.exact.strategy import Strategy
from paceline.scale.batch import LaneChoice
from paceline.train.saving.run_state import Registered, RunState
from paceline.world.world import World

_RECORDER = "paceline.verify.recorder"
"""Imported by its name, and only in a run that is recorded: `verify` stands above `train`, which must not import it."""


class Examiner(Protocol):
    """Looks into the loop of a run. Every rank has the same one, and makes the same calls."""

    choice: LaneChoice | None
    """A step in which the ranks run other lanes than usual."""
    last_step: int
    """The loop ends after this step, and evaluates after it in the first epoch; 0: it takes all steps."""
    save_step: int
    """The loop saves after this step, too; 0 or less: only when a save is due."""

    def begin(
        self, done: int, strategy: Strategy, parts: Registered, updates: Updates, state: RunState
    ) -> None:
        """Look at the run before the first step, or after the step that was restored."""

    def before_step(self, index: int) -> None:
        """Look at a step that begins; an update of it may be observed."""

    def after_step(self, done: int, sums: StepSums, metrics: Mapping[str, float]) -> None:
        """Look at the run after this many steps: reported and saved."""


def load_examiner(config: RunConfig, world: World) -> Examiner | None:
    """Return what records this run; None for a training as usual."""
    if not config.record.to:
        return None
    recorder: Examiner = import_module(_RECORDER).Recorder(config, world)
    return recorder
