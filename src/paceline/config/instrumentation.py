"""What other verbs ask a run to write down: verify, scale, profile."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.checks import at_least


@dataclass(frozen=True)
class RecordConfig:
    """What `paceline verify` and `paceline scale` ask a run to write down."""

    to: str = ""
    """Folder for the record of every step; empty: no record."""
    steps: int = 0
    """End the run after so many recorded steps; 0: never."""
    dump_step: int = -1
    """The step after which all tensors are written out; -1: none."""
    times: str = ""
    """Folder for the times of every step on every rank, for `paceline scale`; empty: none."""


@dataclass(frozen=True)
class ProfileConfig:
    """What `paceline profile` asks a run to measure."""

    to: str = ""
    """Folder for what every rank measured; empty: nothing is."""
    skip: int = 5
    """Steps before, which warm up."""
    steps: int = 5
    """Steps that are measured; the run ends after them."""

    def __post_init__(self) -> None:
        """Refuse a window without steps."""
        at_least(1, "profile.skip", self.skip)
        at_least(1, "profile.steps", self.steps)
