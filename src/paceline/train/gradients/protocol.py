"""What every gradient sum can do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from paceline.train.gradients.lane_stack import LaneGradients
from paceline.train.gradients.note import Note


class GradientSum(Protocol):
    """Adds the gradients and notes of all lanes of an update; the sum ends up in each parameter's `grad`."""

    idle: int
    """Extra lanes that this rank must run first, so that other ranks can gather its shards."""
    is_complete: bool
    """Whether every lane of every rank gave every parameter a gradient in the last update."""

    def begin(self) -> None:
        """Start an update without gradients."""

    def before_lane(self, note: Note, *, last: bool) -> None:
        """Take the note of a lane whose backward comes next. That of the last lane may send gradients."""

    def after_lane(self) -> None:
        """Take the gradients of a lane that is not this rank's last, or end an idle lane."""

    def finish(self) -> Note:
        """Take the gradients of the last lane; return the sum of the notes over all ranks."""

    def close(self) -> None:
        """Remove the hooks from the parameters: another sum takes its place."""


class LaneResults(NamedTuple):
    """The gradients of a rank's lanes: those of the newest lanes, and sums of whole subtrees."""

    newest: LaneGradients
    sums: list[LaneGradients]
