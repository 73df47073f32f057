"""Settings that other verbs pass to a run: verify, scale and profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.checks import at_least


@dataclass(frozen=True)
class RecordConfig:
    """Data that `paceline verify` and `paceline scale` collect from a run."""

    to: str = ""
    """Folder for a record of every step; empty: no record."""
    steps: int = 0
    """Stop the run after this many recorded steps; 0: no limit."""
    epoch_steps: int = 0
    """Cut every epoch to this many steps, its short last step included; 0: leave epochs whole."""
    ends_script: bool = False
    """End the script after its loop over run.steps; the code that follows may need whole epochs."""
    dump_step: int = -1
    """Write all tensors after this step, and a trace of it on every rank; -1: never."""
    arrangement: Literal["usual", "swapped", "reversed", "partners", "dealt"] = "usual"
    """Which rank runs which lanes in the step of the trace: an experiment of verify."""
    save_step: int = -1
    """Save a checkpoint after this step; -1: as usual; 0: within the second epoch, or in the middle of a shorter run."""
    times: str = ""
    """Folder for the step times of every rank; empty: no times."""


@dataclass(frozen=True)
class ProfileConfig:
    """Steps that `paceline profile` measures."""

    to: str = ""
    """Folder for the traces of all ranks; empty: no profile."""
    skip: int = 5
    """Warm-up steps before the profile starts."""
    steps: int = 5
    """Steps to profile; the run ends after them."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an empty window."""
        at_least(1, "profile.skip", self.skip)
        at_least(1, "profile.steps", self.steps)
